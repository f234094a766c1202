"""Mixtures of experts: routing, the experts' layers on CPUs and GPUs, and the families that have them."""
