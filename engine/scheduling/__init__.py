"""Which requests compute what in the next step. Pure Python on plain data."""
