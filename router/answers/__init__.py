"""What requests ask of answers: a format, tools, separate reasoning."""
