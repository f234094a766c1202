"""Grammars that may have hung a worker: no other worker is given them."""

from __future__ import annotations

import time

from common.errors import EngineError
from router.journal import Journal
from router.workers.worker_link import Leg

# A worker hung if it was lost after so long without a step: longer than a slow CPU's step with a prompt, shorter than
# --stall-seconds and --worker-timeout-seconds, after which it is lost. A grammar's cost shows in its first tokens.
SILENT_SECONDS = 3.0
FIRST_TOKENS = 4


def suspicion(journal: Journal, leg: Leg) -> EngineError | None:
    """Return the error that ends a choice whose grammar may be why its worker was lost; None: it is not suspected."""
    num_new = len(journal.output_token_ids) - leg.num_tokens_at_first if leg.first_time else 0
    silent_seconds = time.monotonic() - max(leg.link.last_step, leg.opened)
    if journal.sampling.grammar and num_new < FIRST_TOKENS and silent_seconds > SILENT_SECONDS:
        return EngineError("the worker stood still in the first steps of this request's grammar, then was lost")
    return None
