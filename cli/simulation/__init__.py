"""A cluster in simulated time: the real policy and scheduler, with steps and pulls replaced by cost models.

`clock.py` orders events by time, `worker.py` has an engine whose steps take the time of a cost model, `cluster.py`
follows a request through router and workers, `simulate.py` is the command.
"""
