"""Chooses which workers serve a request: views of the workers, predicted costs, policies. Pure."""
