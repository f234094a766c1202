"""One persistent kernel for all layers of a decoder and one decode row, instead of several launches per layer."""
