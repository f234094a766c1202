"""Imported by the process that forks services (forked.py): what they import when they start."""

# ruff: noqa: F401

import gc

import router.server
import tests.harness.forked
import worker.engine_process.main
import worker.service

gc.collect()
gc.freeze()  # nothing of it is collected, and so written to, in a fork
