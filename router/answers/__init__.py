"""What requests ask of answers: a format, tools, reasoning that is told apart."""
