"""Steps of one decode row as one persistent kernel, for models that it supports."""
