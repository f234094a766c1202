"""A worker without a model: a real gRPC server whose tokens are a function of the request.

A token depends on prompt, seed and all tokens before it, so a migrated request gets the same tokens only if none was
lost, repeated or changed. Its script can make it slow, silent, failing or dead.
`python tests/harness/scripted_worker.py --role decode ...` runs one as a process, for benchmarks.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import uvloop

from common.model_files import resolve_model
from common.net.rpc import RpcServer
from common.text.load import load_tokenizer
from common.token_ids import num_ids, unpack_ids
from kvstore.pool.block_hash import HASH_VERSION, block_keys, root_key
from protos import decode_pb2_grpc, prefill_pb2_grpc
from protos import types_pb2 as pb

BLOCK_SIZE = 16


@dataclass
class Script:
    """The behaviour of a worker. Tests may change it at any time."""

    reply: list[int] | None = None  # these tokens, then end of sequence; None: endless printable bytes
    delay_seconds: float = 0.0  # before each step
    pause_seconds: float = 0.0  # after each step; an idle worker answers at once
    tokens_per_step: int = 1
    eos_token_id: int = 257
    token_range: tuple[int, int] = (32, 127)
    refuse: Any = None  # a FailureCode with which every Submit fails
    refuse_param: str = ""  # the field of the client's request in that failure
    is_silent: bool = False  # accept and never answer
    die_after_tokens: int = -1  # break the streams after this many tokens, once
    cached_tokens: int = 0
    ignores_cancels: bool = False  # as if each came just after the end of its request
    has_no_handle: bool = False  # as a prefill worker that has no room to keep the KV
    spoil: Callable[[pb.StepReport], None] | None = None  # changes each report before it is sent
    refuse_streams: int = 0  # break this many streams before their first report


@dataclass(eq=False)
class Running:
    """One open request of a session."""

    submit: pb.Submit
    output: list[int]
    state: int
    is_first: bool = True


@dataclass(eq=False)
class Session:
    reports: asyncio.Queue[pb.StepReport | None] = field(default_factory=asyncio.Queue)
    running: dict[str, Running] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    sent: asyncio.Event = field(default_factory=asyncio.Event)


@cache
def tokenizer_hash() -> str:
    return load_tokenizer(resolve_model("dry-run")).tokenizer_hash()


class ScriptedWorker:
    """Serves Prefill or Decode on a free port."""

    def __init__(self, role: str, worker_id: str = "", script: Script | None = None, **info: Any) -> None:
        self.role = role
        self.script = script or Script()
        self.submits: list[pb.Submit] = []
        self.cancels: list[str] = []
        self.releases: list[str] = []
        self.num_tokens = 0
        self.sessions: set[Session] = set()
        self.is_draining, self.num_drain_changes = False, 0
        self.worker_id = worker_id or role
        self.sequence = 0
        self.keys: set[bytes] = set()
        self._info = {
            "worker_id": self.worker_id, "role": role, "epoch": 1, "model": "dry-run", "model_fingerprint": "f" * 64,
            "tokenizer_hash": tokenizer_hash(), "vocab_size": 320,
            "max_model_len": 512, "block_size": BLOCK_SIZE, "hash_version": HASH_VERSION,
            "kv_dtype": "float32", "num_blocks": 64, "block_bytes": 1024, "transports": ["tcp"], "version": "test",
            "quantization": "none", "device": "cpu", "attention_backend": "mirror", "max_num_seqs": 64,
            "kv_layout": "full", **info,
        }  # fmt: skip
        self.server: RpcServer | None = None
        self.host = "127.0.0.1"
        self.port = 0
        self.num_streams = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self, token: str = "") -> ScriptedWorker:
        """Listen, after `kill` on the same port again."""
        self.server = RpcServer(self.host, self.port, token)
        self.port = self.server.port
        if self.role == "prefill":
            self.server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self, "mini_infer.v1.Prefill")
        else:
            self.server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self, "mini_infer.v1.Decode")
        await self.server.start()
        await self.server.health.set_serving(True)
        return self

    def speak(self) -> None:
        """End the silence of the script."""
        self.script.is_silent = False
        for session in self.sessions:
            session.wake.set()

    async def kill(self) -> None:
        """End at once, like a killed process."""
        assert self.server is not None
        for session in list(self.sessions):
            session.reports.put_nowait(None)
        await self.server.stop(0)
        self.server = None

    # -- the service -------------------------------------------------------------------------------------------

    async def Describe(self, _request: pb.DescribeRequest, _context: Any) -> pb.WorkerInfo:
        return pb.WorkerInfo(**self._info)

    async def Drain(self, request: pb.DrainRequest, _context: Any) -> pb.DrainReply:
        self._drain(True)
        for session in self.sessions:
            session.reports.put_nowait(pb.StepReport(load=self._load(session)))
        num_open = sum(len(session.running) for session in self.sessions)
        return pb.DrainReply(num_open_requests=num_open, num_drain_changes=self.num_drain_changes)

    async def Undrain(self, request: pb.UndrainRequest, context: Any) -> pb.UndrainReply:
        self._drain(False)
        return pb.UndrainReply(num_drain_changes=self.num_drain_changes)

    def _drain(self, is_draining: bool) -> None:
        self.is_draining = is_draining
        self.num_drain_changes += 1

    async def Attach(self, commands: AsyncIterator[pb.Command], _context: Any) -> AsyncIterator[pb.StepReport]:
        self.num_streams += 1
        if self.script.refuse_streams:
            self.script.refuse_streams -= 1
            return
        session = Session()
        self.sessions.add(session)
        snapshot = pb.KvEvent(sequence=self.sequence, snapshot=pb.BlockKeys(keys=sorted(self.keys)))
        session.reports.put_nowait(pb.StepReport(kv_events=[snapshot], load=self._load(session)))
        tasks = [asyncio.create_task(self._read(session, commands)), asyncio.create_task(self._steps(session))]
        try:
            while (report := await session.reports.get()) is not None:
                session.taken.set()
                yield report
                session.sent.set()
        finally:
            for task in tasks:
                task.cancel()
            self.sessions.discard(session)

    async def _read(self, session: Session, commands: AsyncIterator[pb.Command]) -> None:
        async for command in commands:
            if command.HasField("cancel"):
                self.cancels.append(command.cancel.request_id)
                if not self.script.ignores_cancels:
                    session.running.pop(command.cancel.request_id, None)
                continue
            if command.HasField("release"):
                self.releases.append(command.release.lease_id)
                continue
            if command.HasField("drain_noted"):
                continue
            submit = command.submit
            self.submits.append(submit)
            if self.script.refuse is not None:
                refusal = pb.Failure(
                    request_id=submit.request_id, code=self.script.refuse, message="refused by script",
                    param=self.script.refuse_param, error_code="made_up" if self.script.refuse_param else "",
                )  # fmt: skip
                session.reports.put_nowait(pb.StepReport(failures=[refusal]))
                continue
            history = [*unpack_ids(submit.prompt_token_ids), *submit.output_token_ids]
            state = zlib.crc32(array("I", history).tobytes(), submit.sampling.seed & 0xFFFFFFFF)
            session.running[submit.request_id] = Running(submit, list(submit.output_token_ids), state)
            session.wake.set()
        session.reports.put_nowait(None)

    # -- steps -------------------------------------------------------------------------------------------------

    async def _steps(self, session: Session) -> None:
        while True:
            if not session.running or self.script.is_silent:
                session.wake.clear()
                await session.wake.wait()
                continue
            if self.script.delay_seconds >= 0.001:
                await asyncio.sleep(self.script.delay_seconds)
            elif self.script.delay_seconds:
                time.sleep(self.script.delay_seconds)  # noqa: ASYNC251 - the loop's timers are a millisecond coarse
                await asyncio.sleep(0)
            while session.reports.qsize() > 1:  # like a real worker: one step at a time for all requests
                session.taken.clear()
                await session.taken.wait()
            if self.script.is_silent:  # has become silent meanwhile
                continue
            report = pb.StepReport()
            for name, running in list(session.running.items()):
                delta = report.deltas.add()
                delta.request_id = name
                self._advance(running, delta)
                if delta.finish_reason:
                    del session.running[name]
                    self._store(running, report)
            report.load.CopyFrom(self._load(session))
            if self.script.spoil is not None:
                self.script.spoil(report)
            session.sent.clear()
            session.reports.put_nowait(report)
            if self.script.pause_seconds:
                await session.sent.wait()
                time.sleep(self.script.pause_seconds)  # noqa: ASYNC251 - the loop's timers are a millisecond coarse
                await asyncio.sleep(0)
            if 0 <= self.script.die_after_tokens <= self.num_tokens:
                self.script.die_after_tokens = -1
                session.reports.put_nowait(None)
                return

    def _advance(self, running: Running, delta: pb.TokenDelta) -> None:
        submit, sampling = running.submit, running.submit.sampling
        if running.is_first:
            running.is_first = False
            cached = min(self.script.cached_tokens, num_ids(submit.prompt_token_ids) - 1)
            delta.times.CopyFrom(pb.RequestTimes(prefill_seconds=0.001, num_cached_tokens=cached))
            if sampling.HasField("prompt_logprobs"):
                alternatives = sampling.prompt_logprobs
                delta.prompt_logprobs.extend(
                    logprobs_of(t, alternatives) for t in unpack_ids(submit.prompt_token_ids)[1:]
                )
        num_tokens = self.script.tokens_per_step if submit.keep else 1
        for _ in range(num_tokens):
            token = self._next_token(running)
            delta.token_ids.append(token)
            self.num_tokens += 1
            if sampling.HasField("logprobs"):
                delta.logprobs.append(logprobs_of(token, sampling.logprobs))
            if token == self.script.eos_token_id or token in sampling.stop_token_ids:
                delta.finish_reason = pb.FINISH_REASON_STOP
                delta.stop_token_id = token
                return
            if len(running.output) >= sampling.max_tokens:
                delta.finish_reason = pb.FINISH_REASON_LENGTH
                return
        if not submit.keep:
            delta.finish_reason = pb.FINISH_REASON_PREFILLED
            if self.script.has_no_handle:
                return
            delta.kv_handle.CopyFrom(
                pb.KvHandle(
                    lease_id=f"lease-{submit.request_id}", worker_id=self.worker_id, epoch=1,
                    num_tokens=num_ids(submit.prompt_token_ids),
                )
            )  # fmt: skip

    def _next_token(self, running: Running) -> int:
        position = len(running.output)
        reply = self.script.reply
        if reply is not None:
            token = reply[position] if position < len(reply) else self.script.eos_token_id
        else:
            low, high = self.script.token_range
            token = low + running.state % (high - low)
        running.output.append(token)
        running.state = zlib.crc32(array("I", [token]).tobytes(), running.state)
        return token

    def _store(self, running: Running, report: pb.StepReport) -> None:
        """Add the prompt's blocks to the prefix cache."""
        submit = running.submit
        root = root_key(self._info["model_fingerprint"], submit.adapter, submit.cache_salt)
        new = [key for key in block_keys(root, submit.prompt_token_ids, BLOCK_SIZE) if key not in self.keys]
        if new:
            self.keys.update(new)
            self.sequence += 1
            report.kv_events.add(sequence=self.sequence, stored=pb.BlockKeys(keys=new))

    def _load(self, session: Session) -> pb.LoadReport:
        return pb.LoadReport(
            num_running=len(session.running), kv_blocks_total=64, kv_blocks_free=64, num_steps=self.num_tokens,
            draining=self.is_draining, num_drain_changes=self.num_drain_changes,
        )  # fmt: skip


def logprobs_of(token: int, alternatives: int) -> pb.TokenLogprobs:
    """Return an invented distribution in which the token itself is the most likely."""
    tops = [(token + offset) % 256 for offset in range(alternatives)]
    return pb.TokenLogprobs(
        token_id=token, logprob=-0.125 * (token % 8), rank=1, top_token_ids=tops,
        top_logprobs=[-0.125 * (token % 8) - offset for offset in range(alternatives)],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", default="decode")
    parser.add_argument("--worker-id", default="")
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--delay-seconds", type=float, default=0.0)
    parser.add_argument("--pause-seconds", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=512)
    arguments = parser.parse_args()

    async def serve() -> None:
        script = Script(
            tokens_per_step=arguments.tokens_per_step,
            delay_seconds=arguments.delay_seconds,
            pause_seconds=arguments.pause_seconds,
        )
        length = arguments.max_model_len
        worker = await ScriptedWorker(arguments.role, arguments.worker_id, script, max_model_len=length).start()
        print(worker.address, flush=True)
        await asyncio.Event().wait()

    uvloop.run(serve())


if __name__ == "__main__":
    main()
