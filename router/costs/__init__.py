"""Placement by predicted costs: measurements of each worker, and the roles that choose with `routing`."""
