"""All layers of a dense decoder for one decode row as one persistent kernel, instead of launches for each."""
