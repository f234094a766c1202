"""Workers of several processes: the pools of their ranks, and a pipeline stage on another host."""
