"""Loads in threads: in every case the loop gets a result and the lease ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from common.errors import TransferError
from engine.request import Request, RequestId, SamplingParams
from engine.scheduled_step import KvLoad
from kvstore.handle.handle import PeerLease, PeerShard, ShardAddress
from kvstore.transports.client import KvClient
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.types import BlockId, BlockKey, Epoch, LeaseId, WorkerId
from tests.kvstore.helpers import GEOMETRY
from worker.kv.kv_loads import KvPuller

NAME = (LeaseId("lease"), WorkerId("w"), Epoch(1))
SHARD = PeerShard(*NAME, GEOMETRY, ShardAddress(), (BlockId(3),), (7,))
LEASE = PeerLease(*NAME, 16, 60.0, (SHARD,))
LOAD = KvLoad(Request(RequestId("r"), [1, 2], SamplingParams()), LEASE, [0], [BlockId(1)], 4)
PREFETCH = KvLoad(None, LEASE, [0], [BlockId(1)], 4, [BlockKey(b"key")])


class Client:
    """Stands for a KvClient and a LeaseClient."""

    geometry = GEOMETRY

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.released: list[str] = []
        self.has_released = threading.Event()

    def pull(
        self, lease: PeerLease, positions: Sequence[int], block_ids: Sequence[BlockId], deadline_seconds: float
    ) -> str:
        if self.error is not None:
            raise self.error
        return "made up"

    def release(self, lease: PeerLease) -> bool:
        self.released.append(lease.lease_id)
        self.has_released.set()
        return True

    def close(self) -> None:
        pass


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def has_result() -> threading.Event:
    return threading.Event()


@pytest.fixture
def puller(client: Client, has_result: threading.Event) -> Iterator[KvPuller]:
    made = KvPuller([cast(KvClient, client)], cast(LeaseClient, client), has_result.set)
    yield made
    made.close()


@pytest.mark.parametrize("error", [None, TransferError("told to fail"), RuntimeError("a bug")], ids=str)
@pytest.mark.parametrize(("job", "request_id"), [(LOAD, "r"), (PREFETCH, "")], ids=["load", "prefetch"])
def test_every_job_has_a_result_and_ends_its_lease(
    job: KvLoad, request_id: str, error: Exception | None, puller: KvPuller, client: Client,
    has_result: threading.Event, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A bug is logged. No request waits for a prefetch."""
    client.error = error
    puller.keep_alive(LEASE)
    puller.load(job)
    assert has_result.wait(30)
    ((ended, pull),) = puller.take_results()
    assert (ended, pull.request_id, pull.ok, pull.error) == (job, request_id, error is None, str(error or ""))
    assert (pull.transport, pull.num_bytes) == (("", 0) if error else ("made up", GEOMETRY.block_bytes))
    assert ("RuntimeError: a bug" in caplog.text) == isinstance(error, RuntimeError)
    assert puller.num_open == 0
    assert client.has_released.wait(30)
    assert client.released == ["lease"]


def test_a_lease_that_another_request_gave_back_is_not_read(
    puller: KvPuller, client: Client, has_result: threading.Event
) -> None:
    puller.keep_alive(LEASE)
    puller.abandon(LEASE)
    assert client.has_released.wait(30)
    puller.load(LOAD)
    assert has_result.wait(30)
    ((_, result),) = puller.take_results()
    assert not result.ok
    assert client.released == ["lease"]


def test_what_is_kept_for_requests_to_come_is_let_go_at_the_end(puller: KvPuller, client: Client) -> None:
    puller.keep_alive(LEASE)
    puller.close()
    assert client.released == ["lease"]
