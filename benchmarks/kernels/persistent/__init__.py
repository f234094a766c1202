"""The persistent kernel of all layers, for one row of a decoder with random weights."""
