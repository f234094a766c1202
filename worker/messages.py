"""Messages between a worker's front and its engine process: typed structs, encoded as lists in msgpack.

They contain types of other modules as they are: settings, log-probabilities and leases. Whatever the front only
passes on between routers and the engine process is serialized protobuf.
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
    """A repeated part of a message, encoded without field names, so that a step of 256 requests costs little."""


class Message(Row, tag=True):
    """One frame. The first item of the list is the class name."""


# -- front -> engine process ---------------------------------------------------------------------------------


class Start(Message):
    """The first message: all settings of a worker, with `worker_id` and `run_dir` filled in."""

    worker: WorkerConfig
    engine: EngineConfig
    gpu: GpuConfig
    kv_address: str = ""  # where peers reach the front's KvTransfer service


class Command(Message):
    """A command of a router, or of the front itself."""

    data: bytes  # protobuf's Command


class Renew(Message):
    lease_id: LeaseId
    epoch: Epoch
    lease_seconds: float


class Stage(Message):
    """A reader without access to GPU memory asks for copies of this lease's blocks in host memory."""

    lease_id: LeaseId
    first: int  # position in the lease of the first block to copy


class Stop(Message):
    """The last message."""


ToEngine = Start | Command | Renew | Stage | Stop


# -- engine process -> front ---------------------------------------------------------------------------------


class Ready(Message):
    """The model is loaded."""

    info: bytes  # protobuf's WorkerInfo without the fields that the front sets: worker_id, role, version
    shm_sockets: list[str]  # where the descriptors of all ranks' pools are handed out
    needs_staging: bool  # leased blocks must be copied to those pools first
    descriptions: dict[str, bytes]  # by transport, for peers that have the cluster's token


class Failed(Message):
    """The engine cannot start or continue."""

    reason: str


class Delta(Row):
    """The output of one step for one request."""

    request_id: RequestId
    token_ids: list[TokenId]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    handle: bytes | None = None  # protobuf's KvHandle, with PREFILLED
    times: bytes | None = None  # protobuf's RequestTimes, with the first delta
    num_draft_tokens: int = 0  # both counts with the last delta
    num_accepted_tokens: int = 0


class Pull(Row):
    """The outcome of one KV pull. error: why it failed."""

    request_id: RequestId
    ok: bool
    error: str = ""
    transport: str = ""
    num_bytes: int = 0
    seconds: float = 0.0


class StepReport(Message):
    """Everything that one iteration of the engine process's loop did; the loop fills it in."""

    deltas: list[Delta] = []
    offers: list[bytes] = []  # this and the next: protobuf's KvOffers and Failures
    failures: list[bytes] = []
    granted: list[Lease] = []
    ended_leases: list[LeaseId] = []
    staged: list[tuple[LeaseId, int, list[BlockId] | None]] = []  # first position, and rows; None: no room
    pulls: list[Pull] = []
    stored: list[BlockKey] = []
    removed: list[BlockKey] = []
    load: bytes = b""  # protobuf's LoadReport, the engine's part
    preemptions: int = 0  # this and the next two are totals since the start
    prefix_queries: int = 0
    prefix_hits: int = 0
    figures: Mapping[str, Sequence[float]] = {}  # metrics of wings, by name, see `engine.wings.Figures`

    @property
    def has_news(self) -> bool:
        """Whether the report contains more than load and counters."""
        requests = self.deltas or self.failures or self.pulls
        leases = self.granted or self.ended_leases or self.staged
        return bool(requests or leases or self.stored or self.removed)


ToFront = Ready | Failed | StepReport
