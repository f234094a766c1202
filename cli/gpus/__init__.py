"""Workers of `serve` on several GPUs: which GPUs and ranks each takes, and how many workers there are."""
