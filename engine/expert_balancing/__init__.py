"""Expert balancing: counts of the experts that tokens choose, placements made of them, moves while serving."""
