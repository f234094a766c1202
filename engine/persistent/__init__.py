"""Steps of one decode row as one persistent kernel, for dense models that it takes."""
