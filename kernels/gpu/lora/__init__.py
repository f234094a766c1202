"""GEMMs of low rank with the adapters that rows of a step name, one launch for all adapters."""
