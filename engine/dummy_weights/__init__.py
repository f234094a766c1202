"""Random weights in place of a checkpoint's, for benchmarks of models whose files are not at hand."""
