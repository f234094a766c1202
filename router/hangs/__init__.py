"""Workers that keep their connection open and say nothing, or say that they do not serve."""
