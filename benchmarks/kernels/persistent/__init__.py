"""The persistent kernel of all layers, for one row of a decoder of random weights."""
