"""What a request asks of the chat template: variables, a final message that is continued."""
