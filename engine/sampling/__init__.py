"""From logits to tokens on a CPU: what a request's parameters do to its logits, sampling, log-probabilities."""
