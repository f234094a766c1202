"""What answers tell beside their text: log-probabilities, token ids, the prompt."""
