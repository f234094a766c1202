"""Engines that hang, told apart from slow ones. Without it a worker notices only the end of its engine process."""
