"""What a worker says that it does while it starts."""
