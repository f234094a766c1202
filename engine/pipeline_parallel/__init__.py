"""Pipeline parallelism: stages of consecutive layers, the hidden states between them, and a stage on another host."""
