"""Details of answers in addition to their text: log-probabilities, token ids, the prompt."""
