"""The processes of ranks 1 to n - 1: rank 0 starts them, gives them pools, watches and ends them."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from common.errors import ConfigError
from common.logging import current_format
from engine.config import EngineConfig, GpuConfig, Stage
from engine.engine import DeviceLostError
from engine.pipeline_parallel.hidden_ring import RingFds, RingSource
from engine.pipeline_parallel.socket_frames import receive_frame
from engine.plan import StepPlan
from engine.request import TokenId
from engine.tensor_parallel.plan_ring import LENGTH, RingWriter, ring_bytes
from kvstore.layout import Shard

READY = b"\x01"
STOP_SECONDS = 5.0
POLL_SECONDS = 0.5


class FollowerStart(msgspec.Struct):
    """The first message to a follower. Its descriptors are inherited under the same numbers."""

    rank: int  # the follower's rank, see `place_of`
    shard: Shard
    device: str  # device type
    engine: EngineConfig  # resolved config
    gpu: GpuConfig
    folder: str  # where ranks and stages meet
    ring_fd: int
    wake_fd: int
    log_format: str
    stage: Stage | None = None
    hidden_in: RingFds | None = None  # rings from the previous and to the next stage, on a CPU
    hidden_out: RingFds | None = None
    is_remote: bool = False  # on another host: the link replaces descriptors and rings


class FollowerLoaded(msgspec.Struct):
    """The follower's answer, once its weights are loaded."""

    fingerprint: str
    num_blocks: int = 0  # KV blocks that fit its GPU; 0: not measured


class FollowerPool(msgspec.Struct):
    """The second message. On a CPU of this host, it carries the descriptor of the pool's memory."""

    num_blocks: int
    num_host_slots: int
    max_model_len: int
    is_shared: bool = False  # on a GPU: allocate a pool that rank 0 can map, and answer with its descriptor


class FollowerStep(msgspec.Struct):
    """A plan, and how many earlier steps' results rank 0 has read.

    sampled: for stages that do not sample, the tokens of each row of the steps whose results were read since the last
    plan.
    """

    plan: StepPlan
    num_finished: int
    sampled: Sequence[Sequence[Sequence[TokenId]]] = ()


def place_of(rank: int, config: EngineConfig) -> tuple[Shard, Stage | None]:
    """Return a rank's shard and stage: rank 0 and its peers are the last stage, the next ranks the first one, and so
    on.

    Stage None: all layers.
    """
    index, rank_in_stage = divmod(rank, config.tp)
    stage = Stage((index - 1) % config.pp, config.pp) if config.pp > 1 else None
    return Shard(rank_in_stage, config.tp), stage


STEP_ENCODER = msgspec.msgpack.Encoder()


class Followers:
    """Processes that run the same plans as rank 0, each on its own shard."""

    def __init__(self, config: EngineConfig, device: str, gpu: GpuConfig) -> None:
        """Start all ranks of `config` except rank 0, and return while they load. config: resolved."""
        num_followers = config.num_ranks - 1
        self.on_work: Callable[[], None] = lambda: None
        self._work = 0
        self.folder = Path(tempfile.mkdtemp(prefix="mini-infer-ranks-"))
        self._num_peers = config.tp  # ranks per stage
        # By rank in its stage, then by sending stage.
        rings = [[RingFds.create() for _ in range(config.pp - 1)] for _ in range(config.tp if device == "cpu" else 0)]
        self._hidden_in = rings[0][-1] if rings and rings[0] else None
        self._links: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        ring_fd = os.memfd_create("mini-infer-plans")
        os.ftruncate(ring_fd, ring_bytes(num_followers))
        wake_fds = [os.eventfd(0) for _ in range(num_followers)]
        self._ring = RingWriter(ring_fd, wake_fds, partial(_check, self._processes))
        for rank, wake_fd in enumerate(wake_fds, 1):
            ours, theirs = socket.socketpair()
            shard, stage = place_of(rank, config)
            start = FollowerStart(
                rank, shard, device, config, gpu, str(self.folder), ring_fd, wake_fd, current_format(), stage
            )
            if stage is not None and rings:
                ends = None, *rings[shard.rank], None
                start.hidden_in, start.hidden_out = ends[stage.index : stage.index + 2]
            hidden = [fd for ring in (start.hidden_in, start.hidden_out) if ring for fd in (ring.memory, ring.wake)]
            with theirs:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "engine.tensor_parallel.follower", str(theirs.fileno())],
                        stdin=subprocess.DEVNULL,
                        pass_fds=(theirs.fileno(), ring_fd, wake_fd, *hidden),
                    )
                )
            self._links.append(ours)
            _send(ours, start, [])
        os.close(ring_fd)
        self._ending = threading.Event()
        weakref.finalize(self, _end, self._ending, self._links, self._processes, self.folder)

    def wait_for_weights(self) -> list[FollowerLoaded]:
        """Wait until all have loaded their weights.

        Raises ConfigError if one has ended instead, which has logged why.
        """
        found = []
        for rank, link in enumerate(self._links, 1):
            while not select.select([link], [], [], POLL_SECONDS)[0]:
                continue  # a process that ends closes its link, which makes it readable
            try:
                found.append(msgspec.msgpack.decode(receive_frame(link), type=FollowerLoaded))
            except OSError as error:
                raise ConfigError(f"rank {rank} of the model could not start: its message is above") from error
        return found

    def give_pools(self, pool: FollowerPool, fds: Sequence[int] = ()) -> None:
        """Send the pool to all followers. fds: of the pools' memory, one each or none."""
        for index, link in enumerate(self._links):
            _send(link, pool, [*fds[index : index + 1]])

    def receive(self) -> list[int]:
        """Receive a descriptor from each follower; the caller closes them."""
        return [receive_fds(link, 1, f"rank {rank} of the model")[0] for rank, link in enumerate(self._links, 1)]

    def exchange(self, fd: int) -> list[int]:
        """Exchange one descriptor per rank within each stage. Returns those of this stage, to be closed."""
        fds, size = [os.dup(fd), *self.receive()], self._num_peers
        for rank, link in enumerate(self._links, 1):
            first = rank // size * size
            socket.send_fds(link, [READY], fds[first : first + size])
        for other in fds[size:]:
            os.close(other)
        return fds[:size]

    def hidden_source(self) -> RingSource:
        """Return the source of the previous stage's hidden states. While they are computed, it calls `on_work`."""
        assert self._hidden_in is not None, "one stage has none before it"
        return RingSource(self._hidden_in, self._check_work)

    def send(self, plan: StepPlan, num_finished: int, sampled: Sequence[Sequence[Sequence[TokenId]]] = ()) -> None:
        """Send `plan` to all, see FollowerStep. Raises DeviceLostError if one has ended."""
        self.check()
        self._ring.write(STEP_ENCODER.encode(FollowerStep(plan, num_finished, sampled)))

    def check(self) -> None:
        """Raise DeviceLostError if a process has ended."""
        _check(self._processes)

    def _check_work(self) -> None:
        self.check()
        work, is_runnable = 0, False
        for process in self._processes:
            spent, runs = work_of(process.pid)
            work, is_runnable = work + spent, is_runnable or runs
        if work != self._work or is_runnable:
            self.on_work()
        self._work = work

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` from a thread once a process ends, as a step that waits for it on a GPU does not notice."""
        pidfds = [os.pidfd_open(process.pid) for process in self._processes]
        threading.Thread(target=_watch, args=(pidfds, self._ending, on_lost), name="ranks", daemon=True).start()

    def forget_store(self) -> None:
        """Remove the folder where ranks met, so that nothing remains, however this process ends."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _watch(pidfds: list[int], ending: threading.Event, on_lost: Callable[[str], None]) -> None:
    ended, _, _ = select.select(pidfds, [], [])
    if not ending.is_set():
        on_lost(f"rank {pidfds.index(ended[0]) + 1} of the model ended")
    for pidfd in pidfds:
        os.close(pidfd)


def receive_fds(link: socket.socket, count: int, peer: str) -> list[int]:
    """Receive descriptors. Raises ConfigError if the peer has ended, which has logged why."""
    data, fds, _, _ = socket.recv_fds(link, 1, count)
    if data != READY or len(fds) != count:
        raise ConfigError(f"{peer} could not start: its message is above")
    return fds


def work_of(pid: int) -> tuple[int, bool]:
    """Return a process's ticks of processor time, and whether one of its threads is running or runnable."""
    ticks, is_runnable = 0, False
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            fields = path.read_text().rpartition(")")[2].split()  # the name before it may contain anything
            ticks += int(fields[11]) + int(fields[12])
            is_runnable = is_runnable or fields[0] == "R"
    return ticks, is_runnable


def _check(processes: list[subprocess.Popen[bytes]]) -> None:
    for rank, process in enumerate(processes, 1):
        status = process.poll()
        if status is not None:
            raise DeviceLostError(f"rank {rank} of the model ended with status {status}")


def _end(
    ending: threading.Event, links: list[socket.socket], processes: list[subprocess.Popen[bytes]], folder: Path
) -> None:
    """End the followers, which end when their links close."""
    ending.set()
    shutil.rmtree(folder, ignore_errors=True)
    for link in links:
        link.close()
    for process in processes:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _send(link: socket.socket, message: msgspec.Struct, fds: list[int]) -> None:
    data = msgspec.msgpack.encode(message)
    try:
        socket.send_fds(link, [LENGTH.pack(len(data)) + data], fds)
    except OSError as error:
        raise ConfigError("a rank of the model could not start: its message is above") from error
