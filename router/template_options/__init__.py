"""What a request asks of the chat template: variables, or continuing the final message."""
