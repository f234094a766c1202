"""The process that computes: one engine, its KV pool and leases, in a loop that reads `receive -> step -> report`.

Started by the front with one end of a socket pair. It exits when the front is gone, so no memory outlives a worker.
It knows neither gRPC nor who asked; KV of peers arrives through `KvMover`, in threads, between steps.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from common.errors import MiniInferError, mapping_for, public_message
from common.logging import setup_logging
from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig
from engine.request import FinishReason, Request, RequestId, RequestOutput
from engine.worker.frames import Event, FrameSocket, Op
from engine.worker.mover import KvMover, LoadResult
from engine.worker.shared_pool import SharedPoolMemory
from engine.worker.wire import check_handle, request_kwargs, wire_logprobs
from kvstore.block_hash import HASH_VERSION
from kvstore.leases import LeaseTable
from kvstore.transport import KvClient
from kvstore.types import Epoch, LeaseId

logger = logging.getLogger("rank")
IDLE_WAIT_SECONDS = 0.5  # also the interval of reports without news
LEASE_WAIT_SECONDS = 0.1  # nothing to compute, but leases may expire
BLOCKED_WAIT_SECONDS = 0.002  # work is there but blocks are not: leases and loads will free some


@dataclass(slots=True)
class OpenRequest:
    """What the rank remembers of a request beside what the engine does."""

    request: Request
    arrived: float
    deadline: float  # monotonic; inf: none
    started: float = 0.0
    pull_seconds: float = 0.0
    pulled_tokens: int = 0
    transport: str = ""
    pull_failed: bool = False
    reported: bool = False


class Rank:
    """Applies the front's messages to the engine and reports every turn of the loop in one message."""

    def __init__(
        self, link: FrameSocket, parts: EngineParts, memory: SharedPoolMemory, mover: KvMover, lease_seconds: float
    ):
        self._link = link
        self._engine = parts.engine
        self._pool = parts.engine.scheduler.kv.pool
        self._block_size = parts.geometry.block_size
        self._memory = memory
        self._mover = mover
        self._lease_seconds = lease_seconds
        self._leases = LeaseTable(memory.epoch)
        self._open: dict[RequestId, OpenRequest] = {}
        self._deltas: list[list[Any]] = []
        self._failures: list[list[Any]] = []
        self._granted: list[list[Any]] = []
        self._ended_leases: list[LeaseId] = []
        self._stopping = False
        self._checked = True
        self._next_deadline_check = 0.0
        self._next_report = 0.0

    # -- loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until STOP arrives or the front is gone."""
        wait = 0.0
        while not self._stopping:
            self._receive(wait)
            began = time.monotonic()
            self._apply_loads(began)
            self._expire(began)
            num_steps = self._engine.num_steps
            outputs = self._engine.step()
            self._start_loads(began)
            for row in self._engine.last_rows:
                open_request = self._open.get(row.request.request_id)
                if open_request is not None and not open_request.started:
                    open_request.started = began
            for output in outputs:
                self._report(output, began)
            stepped = self._engine.num_steps != num_steps
            self._send_report(time.monotonic() - began if stepped else 0.0, stepped)
            wait = self._next_wait(stepped)

    def _next_wait(self, stepped: bool) -> float:
        if stepped:
            self._checked = False
            return 0.0
        if self._engine.has_work():
            return BLOCKED_WAIT_SECONDS
        if self._mover.num_open or len(self._leases):
            return LEASE_WAIT_SECONDS
        if not self._checked:
            self._pool.check_integrity()  # cheap enough when idle, and a bug found here is found early
            self._checked = True
        return IDLE_WAIT_SECONDS

    def _receive(self, timeout_seconds: float) -> None:
        for op, *rest in self._link.receive(timeout_seconds):
            if op == Op.SUBMIT:
                self._submit(rest[0], rest[1])
            elif op == Op.CANCEL:
                self._cancel(RequestId(rest[0]))
            elif op == Op.RENEW:
                self._leases.renew(LeaseId(rest[0]), Epoch(rest[1]), time.monotonic(), rest[2])
            elif op == Op.RELEASE:
                self._end_lease(LeaseId(rest[0]), Epoch(rest[1]))
            elif op == Op.STOP:
                self._stopping = True

    # -- requests --------------------------------------------------------------------------------------------

    def _submit(self, name: str, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        handle = fields["handle"]
        try:
            if handle is not None:
                self._mover.keep_alive(handle)
                check_handle(fields, self._block_size)
            request = self._engine.add_request(request_id=RequestId(name), **request_kwargs(fields))
        except MiniInferError as error:
            self._failures.append([name, mapping_for(error).grpc_status, public_message(error)])
            if handle is not None:
                self._mover.abandon(handle)
            return
        deadline = now + fields["deadline_seconds"] if fields["deadline_seconds"] > 0 else float("inf")
        self._open[request.request_id] = OpenRequest(request, now, deadline)

    def _cancel(self, request_id: RequestId) -> None:
        if self._open.pop(request_id, None) is None:
            return
        request = self._engine.abort(request_id)
        if request is not None and request.kv_source is not None:
            handle: Any = request.kv_source
            self._mover.abandon(handle)

    def _expire(self, now: float) -> None:
        for lease in self._leases.expire(now):
            logger.warning(
                "lease %s expired: nobody read the KV of %d blocks", lease.lease_id[:8], len(lease.block_ids)
            )
            self._pool.release(lease.block_ids)
            self._ended_leases.append(lease.lease_id)
        if now < self._next_deadline_check:
            return
        self._next_deadline_check = now + 0.1
        for request_id in [name for name, entry in self._open.items() if entry.deadline < now]:
            self._cancel(request_id)
            self._failures.append([request_id, "DEADLINE_EXCEEDED", "the request's time is over"])

    # -- KV from peers ---------------------------------------------------------------------------------------

    def _start_loads(self, now: float) -> None:
        for job in self._engine.scheduler.take_load_jobs():
            handle: Any = job.source
            entry = self._open.get(job.request.request_id)
            if not job.positions:
                self._mover.abandon(handle)
                continue
            if entry is not None:
                entry.started = now
                entry.pulled_tokens = handle["num_tokens"] - job.positions[0] * self._block_size
            self._mover.load(job.request.request_id, handle, job.positions, job.block_ids)

    def _apply_loads(self, now: float) -> None:
        for result in self._mover.take_results():
            self._apply_load(result, now)

    def _apply_load(self, result: LoadResult, now: float) -> None:
        self._engine.scheduler.finish_load(result.request_id, result.ok)
        entry = self._open.get(result.request_id)
        if entry is None:
            return
        entry.pull_seconds = now - entry.started
        entry.transport = result.transport
        entry.pull_failed = not result.ok
        if not result.ok:
            entry.pulled_tokens = 0

    def _end_lease(self, lease_id: LeaseId, epoch: Epoch) -> None:
        lease = self._leases.release(lease_id, epoch)
        if lease is not None:
            self._pool.release(lease.block_ids)
            self._ended_leases.append(lease_id)

    # -- reports ---------------------------------------------------------------------------------------------

    def _report(self, output: RequestOutput, began: float) -> None:
        request = output.request
        entry = self._open.get(request.request_id)
        if entry is None:
            return
        if output.error is not None:
            del self._open[request.request_id]
            self._failures.append([request.request_id, "INTERNAL", output.error])
            return
        handle = None
        if output.finish_reason is FinishReason.PREFILLED:
            handle = self._grant(request)
        if output.finish_reason is not None:
            del self._open[request.request_id]
        self._deltas.append(
            [
                request.request_id,
                output.new_token_ids,
                output.finish_reason.value if output.finish_reason else None,
                output.stop_token_id,
                wire_logprobs(output.logprobs),
                wire_logprobs(output.prompt_logprobs),
                handle,
                None if entry.reported else self._times(entry),
            ]
        )
        entry.reported = True

    def _grant(self, request: Request) -> dict[str, Any]:
        """Put the request's blocks under a lease; returns the fields of its KvHandle."""
        blocks = self._engine.scheduler.detach_blocks(request)
        lease = self._leases.grant(blocks, time.monotonic(), self._lease_seconds)
        self._granted.append([lease.lease_id, blocks, lease.deadline])
        return {
            "lease_id": lease.lease_id,
            "epoch": self._memory.epoch,
            "num_tokens": request.num_computed_tokens,
            "block_ids": blocks,
            "digests": self._memory.digests(blocks),
            "lease_seconds": self._lease_seconds,
        }

    def _times(self, entry: OpenRequest) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "queue_seconds": max(entry.started - entry.arrived, 0.0),
            "kv_pull_seconds": entry.pull_seconds,
            "prefill_seconds": max(now - entry.started - entry.pull_seconds, 0.0),
            "num_cached_tokens": entry.request.num_cached_tokens,
            "num_pulled_tokens": entry.pulled_tokens,
            "transport": entry.transport,
            "kv_pull_failed": entry.pull_failed,
        }

    def _send_report(self, step_seconds: float, stepped: bool) -> None:
        stored, removed = self._pool.take_events()
        now = time.monotonic()
        news = self._deltas or self._failures or self._granted or self._ended_leases or stored or removed
        if not (stepped or news) and now < self._next_report:
            return
        self._next_report = now + IDLE_WAIT_SECONDS
        load = self._engine.scheduler.load()
        stats = self._engine.scheduler.kv.stats
        last = self._engine.last_step
        self._link.send(
            [
                Event.STEP,
                {
                    "deltas": self._deltas,
                    "failures": self._failures,
                    "stored": stored,
                    "removed": removed,
                    "granted": self._granted,
                    "ended_leases": self._ended_leases,
                    "load": {
                        "num_running": load.num_running,
                        "num_waiting": load.num_waiting,
                        "num_swapped": load.num_swapped,
                        "num_loading": load.num_loading,
                        "num_leases": len(self._leases),
                        "kv_blocks_total": self._pool.num_blocks,
                        "kv_blocks_free": self._pool.num_free,
                        "kv_blocks_cached": self._pool.num_cached,
                        "waiting_prefill_tokens": load.waiting_prefill_tokens,
                        "num_steps": self._engine.num_steps,
                        "step_seconds": step_seconds,
                        "step_prefill_tokens": last.num_prefill_tokens if stepped else 0,
                        "step_decode_tokens": last.num_decode_tokens if stepped else 0,
                    },
                    "counters": {
                        "preemptions": self._engine.scheduler.num_preemptions,
                        "prefix_queries": stats.queried_tokens,
                        "prefix_hits": stats.hit_tokens,
                        "host_hits": stats.host_hit_tokens,
                        "pulled_bytes": self._mover.num_pulled_bytes,
                        "failed_pulls": self._mover.num_failed,
                    },
                },
            ]
        )
        self._deltas, self._failures, self._granted, self._ended_leases = [], [], [], []


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process; the front passes the descriptor of its socket."""
    parser = argparse.ArgumentParser(prog="engine.worker.rank")
    parser.add_argument("--fd", type=int, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = FrameSocket(socket.socket(fileno=args.fd))
    try:
        [[_, start]] = link.receive(60.0)
        setup_logging("rank", start["log_level"])
        rank = _start(link, start)
        rank.run()
    except ConnectionError:
        logger.warning("the worker's front is gone: exiting")
    except MiniInferError as error:
        link.send([Event.FAILED, str(error)])
        return 1
    return 0


def _start(link: FrameSocket, start: dict[str, Any]) -> Rank:
    config = EngineConfig(**start["engine"])
    memory = SharedPoolMemory(start["worker_id"], start["run_dir"], start["agent_socket"])
    parts = assemble(config, memory)
    client = KvClient(parts.geometry, start["cluster_token"], memory.transports)
    mover = KvMover(client, memory.blocks, link.wake)
    memory.serve()
    geometry = parts.geometry
    link.send(
        [
            Event.READY,
            {
                "epoch": memory.epoch,
                "shm_socket": memory.socket_path,
                "transports": memory.transports,
                "model": parts.files.name,
                "model_fingerprint": geometry.fingerprint,
                "vocab_size": parts.model_config.vocab_size,
                "max_model_len": parts.engine.scheduler.max_model_len,
                "eos_token_ids": sorted(parts.engine.eos_token_ids),
                "block_size": geometry.block_size,
                "hash_version": HASH_VERSION,
                "kv_dtype": geometry.dtype,
                "num_blocks": geometry.num_blocks,
                "block_bytes": geometry.block_bytes,
                "kv_shape": geometry.block_shape,
                "quantization": parts.quantization,
                "device": parts.device,
                "max_num_seqs": config.max_num_seqs,
                "pid": os.getpid(),
            },
        ]
    )
    return Rank(link, parts, memory, mover, start["kv_lease_seconds"])


if __name__ == "__main__":
    sys.exit(main())
