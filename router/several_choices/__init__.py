"""Several choices for one prompt: the field `n`, and `best_of` of /v1/completions."""
