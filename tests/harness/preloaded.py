"""Imports the modules of services, in the process that forks them (forked.py)."""

# ruff: noqa: E402, F401

import gc

gc.disable()  # collections would take a fifth of the time of the imports

import router.server
import tests.harness.forked
import worker.engine_process.main
import worker.service
from common.wings import call_wing, from_wing
from engine.assembly import assemble
from engine.config import EngineConfig
from router.app import ROUTES_OF_WINGS
from router.config import RouterConfig
from worker.config import AUTO
from worker.kv.shared_pool import load_transports

# What services import and compile when they start with the model of most clusters.
for routes in ROUTES_OF_WINGS:
    from_wing(routes)
tokenizers = [router.server.load("", "dry-run").tokenizer]
call_wing("router.chat_templates.templates:with_templates", RouterConfig(decode="d:1"), tokenizers)
parts = assemble(EngineConfig("dry-run", num_gpu_blocks=512, num_threads=1), is_offline=True)  # starts no thread
load_transports(AUTO)
del tokenizers, parts

gc.collect()
gc.freeze()  # forks do not collect these objects, and so do not write to their pages
gc.enable()
