"""Expert balancing: counts how often experts are chosen, computes placements, and moves experts while serving."""
