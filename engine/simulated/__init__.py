"""Steps that compute nothing and last as long as a cost model says (`--simulated-steps`)."""
