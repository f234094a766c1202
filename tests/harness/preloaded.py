"""Imported by the process that forks services (forked.py): what they import when they start."""

# ruff: noqa: E402, F401

import gc

gc.disable()  # its walks through what is imported are a fifth of the time

import router.server
import tests.harness.forked
import worker.engine_process.main
import worker.service
from common.wings import from_wing
from router.app import ROUTES_OF_WINGS

for routes in ROUTES_OF_WINGS:  # which a router imports when it starts
    from_wing(routes)

gc.collect()
gc.freeze()  # nothing of it is collected, and so written to, in a fork
gc.enable()
