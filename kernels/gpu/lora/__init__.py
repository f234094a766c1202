"""Low-rank GEMMs of adapters that a step's rows name, with one launch for all adapters."""
