"""What to do when an engine cannot start on a GPU."""
