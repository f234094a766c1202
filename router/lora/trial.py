"""Tries an adapter on workers: each computes one token with it, for which it must read the adapter's files."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from common.errors import DeadlineExceededError, MiniInferError
from common.token_ids import pack_ids
from protos import types_pb2 as pb
from router.workers.failures import WorkerLostError
from router.workers.worker_link import Leg, WorkerLink

SECONDS = 60.0  # a worker may be computing a long prompt; reading takes milliseconds
BEFORE_OTHERS = -(1 << 31)  # a priority that precedes all others


class _Trial:
    """A leg of one token, see LegListener."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_delta(self, leg: Leg, delta: pb.TokenDelta, now: float) -> None:
        if delta.finish_reason and not self.ended.done():
            self.ended.set_result(None)

    def on_failure(self, error: MiniInferError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


async def try_adapter(adapter: str, links: Sequence[WorkerLink]) -> int:
    """Return how many of these workers have read the adapter; workers lost meanwhile read it when they need it.

    Raises InvalidRequestError if a worker cannot use the adapter, and the worker's error if it fails for another
    reason.
    """
    results = await asyncio.gather(*(_try(adapter, link) for link in links), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, WorkerLostError):
            raise result
    return results.count(None)


async def _try(adapter: str, link: WorkerLink) -> None:
    trial = _Trial()
    sampling = pb.SamplingParams(max_tokens=1, top_p=1.0, repetition_penalty=1.0, ignore_eos=True)
    message = pb.Submit(
        request_id=f"adapter-{uuid.uuid4().hex}", prompt_token_ids=pack_ids([0]), sampling=sampling, adapter=adapter,
        priority=BEFORE_OTHERS, deadline_seconds=SECONDS, keep=True,
    )  # fmt: skip
    leg = link.submit(message, 1, trial)
    try:
        async with asyncio.timeout(SECONDS):
            await trial.ended
    except TimeoutError:
        raise DeadlineExceededError(f"worker {link.worker_id} did not read the adapter in time") from None
    finally:
        link.close(leg)
