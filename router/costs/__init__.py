"""Placement by predicted costs: what is learned of each worker as it serves, and the roles that `routing` chooses."""
