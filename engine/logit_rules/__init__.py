"""Rules for a request's logits: token masks, biases and penalties."""
