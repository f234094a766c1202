"""A choice among the workers of a large cluster: the few that are worth a prediction."""
