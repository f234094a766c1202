"""What one turn of the engine's loop tells the front: collected while it runs, rendered once as a STEP message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from common.errors import InvalidRequestError, MiniInferError, mapping_for, public_message
from engine.engine import Engine
from engine.request import RequestOutput
from kvstore.pool.leases import Lease
from kvstore.transport.handle import KvHandle
from kvstore.types import BlockKey, LeaseId
from worker.kv_puller import LoadResult
from worker.wire import wire_logprobs


@dataclass(slots=True)
class Report:
    """Entries are positional lists: a step of 256 requests must cost little to pack."""

    deltas: list[list[Any]] = field(default_factory=list)
    failures: list[list[Any]] = field(default_factory=list)
    granted: list[list[Any]] = field(default_factory=list)
    ended_leases: list[LeaseId] = field(default_factory=list)
    staged: list[list[Any]] = field(default_factory=list)  # lease id, its rows or None
    pulls: list[list[Any]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        lists = (self.deltas, self.failures, self.granted, self.ended_leases, self.staged, self.pulls)
        return not any(lists)

    def add_output(self, output: RequestOutput, handle: KvHandle | None, times: dict[str, Any] | None) -> None:
        self.deltas.append(
            [
                output.request.request_id,
                output.new_token_ids,
                output.finish_reason.value if output.finish_reason else None,
                output.stop_token_id,
                wire_logprobs(output.logprobs),
                wire_logprobs(output.prompt_logprobs),
                None if handle is None else asdict(handle),
                times,
            ]
        )

    def add_failure(self, request_id: str, status: str, message: str, param: str = "", error_code: str = "") -> None:
        """`status` is a name of the exception table; `param` names what the client got wrong."""
        self.failures.append([request_id, status, message, param, error_code])

    def add_error(self, request_id: str, error: MiniInferError) -> None:
        """A failure with what the exception says of it."""
        param = error_code = ""
        if isinstance(error, InvalidRequestError):
            param, error_code = error.param or "", error.code or ""
        self.add_failure(request_id, mapping_for(error).grpc_status, public_message(error), param, error_code)

    def add_lease(self, lease: Lease) -> None:
        self.granted.append([lease.lease_id, lease.block_ids, lease.deadline])

    def add_pull(self, result: LoadResult) -> None:
        self.pulls.append([result.transport, result.num_bytes, result.seconds, result.ok])

    def frame(
        self,
        stored: Sequence[BlockKey],
        removed: Sequence[BlockKey],
        load: dict[str, Any],
        counters: dict[str, int],
    ) -> dict[str, Any]:
        return {
            "deltas": self.deltas,
            "failures": self.failures,
            "granted": self.granted,
            "ended_leases": self.ended_leases,
            "staged": self.staged,
            "pulls": self.pulls,
            "stored": stored,
            "removed": removed,
            "load": load,
            "counters": counters,
        }


def engine_load(engine: Engine, num_leases: int, step_seconds: float) -> dict[str, Any]:
    """Fields of a LoadReport. `step_seconds` is 0 when no step ran since the last one."""
    load, pool, last = engine.scheduler.load(), engine.scheduler.kv.pool, engine.last_step
    return {
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_swapped": load.num_swapped,
        "num_loading": load.num_loading,
        "num_leases": num_leases,
        "kv_blocks_total": pool.num_blocks,
        "kv_blocks_free": pool.num_free,
        "kv_blocks_cached": pool.num_cached,
        "waiting_prefill_tokens": load.waiting_prefill_tokens,
        "num_steps": engine.num_steps,
        "step_seconds": step_seconds,
        "step_prefill_tokens": last.num_prefill_tokens if step_seconds else 0,
        "step_decode_tokens": last.num_decode_tokens if step_seconds else 0,
    }


def engine_counters(engine: Engine) -> dict[str, int]:
    """Totals since the start."""
    stats = engine.scheduler.kv.stats
    return {
        "preemptions": engine.scheduler.num_preemptions,
        "prefix_queries": stats.queried_tokens,
        "prefix_hits": stats.hit_tokens,
        "host_hits": stats.host_hit_tokens,
    }
