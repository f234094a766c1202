"""What `serve` tells those who come from other programs, or have misspelt something."""
