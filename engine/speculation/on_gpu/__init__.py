"""Draft models, EAGLE-3 heads and MTP modules on the model's GPU: what the host queues, and their share of memory."""
