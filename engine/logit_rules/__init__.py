"""What a request wants changed in its logits: masks of tokens, biases and penalties."""
