"""Answer fields besides the text: log-probabilities, token ids, the prompt."""
