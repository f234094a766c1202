"""Messages between a worker's front and its engine process: typed, and lists in msgpack.

Types of other modules travel as they are: settings, log-probabilities and leases. What the front only passes on,
between routers and the engine process, is bytes of protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from engine.config import EngineConfig, GpuConfig
from engine.request import FinishReason, RequestId, TokenId, TokenLogprobs
from kvstore.pool.leases import Lease
from kvstore.types import BlockId, BlockKey, Epoch, LeaseId
from worker.config import WorkerConfig


class Row(msgspec.Struct, array_like=True, gc=False):
    """Repeated part of a message: encoded without field names, so that a step of 256 requests costs little."""


class Message(Row, tag=True):
    """One frame. The first entry of its list is the name of its class."""


# -- front -> engine process ---------------------------------------------------------------------------------


class Start(Message):
    """The first message: all settings of a worker, `worker_id` and `run_dir` filled in."""

    worker: WorkerConfig
    engine: EngineConfig
    gpu: GpuConfig
    kv_address: str = ""  # where peers reach the front's KvTransfer service


class Command(Message):
    """What a router has sent. Requests have the names that the front gives them."""

    data: bytes  # protobuf's Command


class Renew(Message):
    lease_id: LeaseId
    epoch: Epoch
    lease_seconds: float


class Stage(Message):
    """A reader that cannot reach GPU memory wants the blocks of this lease."""

    lease_id: LeaseId
    first: int  # position in the lease: blocks before it are not wanted


class Stop(Message):
    """The last message."""


ToEngine = Start | Command | Renew | Stage | Stop


# -- engine process -> front ---------------------------------------------------------------------------------


class Ready(Message):
    """The model is loaded."""

    info: bytes  # protobuf's WorkerInfo, but for what the front knows: worker_id, role, version
    shm_sockets: list[str]  # where descriptors of the pools of all ranks are handed out
    needs_staging: bool  # leases name blocks that those pools do not hold
    descriptions: dict[str, bytes]  # of transports, by name, for peers that have the cluster's token


class Failed(Message):
    """The engine cannot start, or cannot go on."""

    reason: str


class Delta(Row):
    """Output of one step for one request."""

    request_id: RequestId
    token_ids: list[TokenId]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    handle: bytes | None = None  # protobuf's KvHandle, with PREFILLED
    times: bytes | None = None  # protobuf's RequestTimes, with the first delta
    num_draft_tokens: int = 0  # these two with the last one
    num_accepted_tokens: int = 0


class Pull(Row):
    """Outcome of one KV pull. error: why it failed."""

    request_id: RequestId
    ok: bool
    error: str = ""
    transport: str = ""
    num_bytes: int = 0
    seconds: float = 0.0


class StepReport(Message):
    """Everything that one turn of the engine process's loop did; the loop fills it in."""

    deltas: list[Delta] = []
    offers: list[bytes] = []  # protobuf's KvOffers and Failures, with the engine's ids of requests
    failures: list[bytes] = []
    granted: list[Lease] = []
    ended_leases: list[LeaseId] = []
    staged: list[tuple[LeaseId, int, list[BlockId] | None]] = []  # from which position on; rows, None without room
    pulls: list[Pull] = []
    stored: list[BlockKey] = []
    removed: list[BlockKey] = []
    load: bytes = b""  # protobuf's LoadReport, of the engine's part
    preemptions: int = 0  # this and the next two: totals since the start
    prefix_queries: int = 0
    prefix_hits: int = 0
    figures: Mapping[str, Sequence[float]] = {}  # of wings, by metric: see `engine.wings.Figures`

    @property
    def has_news(self) -> bool:
        """Whether it holds more than load and counters."""
        requests = self.deltas or self.failures or self.pulls
        leases = self.granted or self.ended_leases or self.staged
        return bool(requests or leases or self.stored or self.removed)


ToFront = Ready | Failed | StepReport
