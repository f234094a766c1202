"""Metrics ports of the services of `mini-infer serve`."""
