"""Draft models and EAGLE-3 heads on the GPU of their model: what the host queues, and their part of the memory."""
