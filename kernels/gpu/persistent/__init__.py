"""All layers of a decoder for one decode row as one persistent kernel, instead of launches for each."""
