"""A cluster in simulated time: the router's policy and the engine's scheduler as they are, steps and pulls as costs.

`clock.py` has events in order of time, `worker.py` an engine whose steps take the time of a cost model, `cluster.py`
the way of a request through router and workers, `simulate.py` the command.
"""
