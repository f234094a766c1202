"""Draft models on a GPU: passes that follow each other on the device, and memory next to the model's own."""
