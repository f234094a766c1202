"""The first stage of a two-stage pipeline on another host, for the engine: connects, starts and watches it.

There `python -m worker.ranks.stage` waits for an engine and starts a follower for it. One TCP connection replaces the
descriptors and rings of `Followers`. The stage keeps its KV to itself.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence

import msgspec

from common import VERSION
from common.errors import ConfigError
from common.logging import current_format
from engine.config import EngineConfig, GpuConfig, Stage
from engine.engine import DeviceLostError
from engine.pipeline_parallel.socket_frames import SocketSource, receive_frame, send_frame, watch_peer
from engine.plan import StepPlan
from engine.request import TokenId
from engine.tensor_parallel.followers import STEP_ENCODER, FollowerLoaded, FollowerPool, FollowerStart, FollowerStep
from kvstore.layout import Shard

CONNECT_SECONDS = 10.0
TOKEN_VARIABLE = "MINI_INFER_CLUSTER_TOKEN"  # as for all services; engines in process have no other setting for it


class StageHello(msgspec.Struct):
    """First frame of a connection. The answer is a text: empty, or the reason for refusal."""

    token: str
    version: str


class RemoteStage:
    """A stage on another host, with the methods of `Followers` that a pipeline needs."""

    def __init__(self, config: EngineConfig, device: str, gpu: GpuConfig) -> None:
        """Connect, and start loading the stage. config: resolved. Raises ConfigError with advice."""
        self._address = config.stage_address
        self.on_work: Callable[[], None] = lambda: None
        self._sock = _connect(self._address)
        weakref.finalize(self, self._sock.close)
        start = FollowerStart(
            1, Shard(), device, config, gpu, "", -1, -1, current_format(), Stage(0, 2), is_remote=True
        )
        self._send_starting(msgspec.msgpack.encode(start))

    def wait_for_weights(self) -> list[FollowerLoaded]:
        try:
            return [msgspec.msgpack.decode(receive_frame(self._sock), type=FollowerLoaded)]
        except OSError as error:
            raise self._not_started() from error

    def give_pools(self, pool: FollowerPool, fds: Sequence[int] = ()) -> None:
        """See Followers. The stage allocates its pool itself."""
        self._send_starting(msgspec.msgpack.encode(pool))

    def hidden_source(self) -> SocketSource:
        return SocketSource(self._sock, self._tell_of_work)

    def send(self, plan: StepPlan, num_finished: int, sampled: Sequence[Sequence[Sequence[TokenId]]] = ()) -> None:
        try:
            send_frame(self._sock, STEP_ENCODER.encode(FollowerStep(plan, num_finished, sampled)))
        except OSError as error:
            raise self._lost() from error

    def check(self) -> None:
        """Raise DeviceLostError if the connection has ended."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        if poll.poll(0):
            raise self._lost()

    def watch(self, on_lost: Callable[[str], None]) -> None:
        threading.Thread(target=self._watch, args=(on_lost,), name="stage", daemon=True).start()

    def forget_store(self) -> None:
        """See Followers: there is none."""

    def _watch(self, on_lost: Callable[[str], None]) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        poll.poll()
        on_lost(str(self._lost()))

    def _tell_of_work(self) -> None:
        self.check()
        self.on_work()  # the other host's processor time is not visible here

    def _send_starting(self, data: bytes) -> None:
        try:
            send_frame(self._sock, data)
        except OSError as error:
            raise self._not_started() from error

    def _lost(self) -> DeviceLostError:
        return DeviceLostError(f"the stage at {self._address} ended")

    def _not_started(self) -> ConfigError:
        return ConfigError(f"the stage at {self._address} could not start: its log says why")


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    except OSError as error:
        raise _no_answer(address, error) from error
    try:
        watch_peer(sock)
        send_frame(sock, msgspec.msgpack.encode(StageHello(os.environ.get(TOKEN_VARIABLE, ""), VERSION)))
        refusal = msgspec.msgpack.decode(receive_frame(sock), type=str)
    except (OSError, msgspec.DecodeError) as error:
        sock.close()
        raise _no_answer(address, error) from error
    if refusal:
        sock.close()
        raise ConfigError(f"--stage-address {address}: {refusal}")
    sock.settimeout(None)
    return sock


def _no_answer(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"--stage-address {address}: no free stage answers there ({error}); start `python -m worker.ranks.stage`"
    )
