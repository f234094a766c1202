"""Imports the modules of services, in the process that forks them (forked.py)."""

# ruff: noqa: E402, F401

import gc

gc.disable()  # collections would take a fifth of the time of the imports

import router.server
import tests.harness.forked
import worker.engine_process.main
import worker.service
from common.wings import from_wing
from router.app import ROUTES_OF_WINGS

for routes in ROUTES_OF_WINGS:  # a router imports them when it starts
    from_wing(routes)

gc.collect()
gc.freeze()  # forks do not collect these objects, and so do not write to their pages
gc.enable()
