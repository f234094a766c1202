"""Pipeline parallelism: consecutive layers in stages, hidden states between them, a stage on another host."""
