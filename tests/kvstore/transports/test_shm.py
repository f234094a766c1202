"""Pulls by shared memory: the bytes that arrive, refusals, and a peer that dies."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import HandshakeError, MiniInferError, TransferError
from kvstore.layout import full_attention
from kvstore.transports import shm
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.shm import ShmReader
from kvstore.types import Epoch
from tests.harness.waiting import wait_until
from tests.kvstore.helpers import (
    GEOMETRY,
    OTHER_DTYPE,
    Owner,
    empty_pool,
    host_client,
    ids,
    pull_of_one,
    with_address,
    with_shard,
)


def test_a_changed_block_is_not_accepted(tmp_path: Path) -> None:
    owner, client = Owner(tmp_path), host_client(GEOMETRY, empty_pool())
    peer = owner.peer([3, 4])
    owner.blocks[4, 777] ^= 1
    client.pull(peer, [0], ids(0))
    with pytest.raises(TransferError, match="intact"):
        client.pull(peer, [0, 1], ids(0, 1))
    client.close()
    owner.close()


def test_a_block_that_is_reused_during_the_pull_is_never_accepted(tmp_path: Path) -> None:
    geometry = replace(
        GEOMETRY, layout=full_attention(200, 2, 8, "float32")
    )  # 100 KB: a copy takes long enough to be overtaken
    owner, mine = Owner(tmp_path, geometry), empty_pool(geometry)
    client = host_client(geometry, mine)
    peer = owner.peer([3])
    promised, other = owner.blocks[3].copy(), owner.blocks[4].copy()
    stop = threading.Event()

    def reuse() -> None:
        while not stop.is_set():
            owner.blocks[3] = other
            owner.blocks[3] = promised

    writer = threading.Thread(target=reuse)
    writer.start()
    num_refused = 0
    try:
        for attempt in range(20_000):
            try:
                client.pull(peer, [0], ids(0))
            except TransferError:
                num_refused += 1
            else:
                assert (mine[0] == promised).all()
            if attempt >= 300 and num_refused:
                break
    finally:
        stop.set()
        writer.join()
    assert num_refused > 0  # the race did happen
    client.pull(peer, [0], ids(0))
    client.close()
    owner.close()


def test_what_does_not_fit_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    owner, mine = Owner(tmp_path), empty_pool()
    for geometry in (OTHER_DTYPE, replace(GEOMETRY, fingerprint="x")):
        with pytest.raises(HandshakeError, match="here"):
            host_client(geometry, mine).pull(owner.peer([1]), [0], ids(0))
    client = host_client(GEOMETRY, mine)
    with pytest.raises(TransferError, match="epoch"):
        client.pull(with_shard(owner.peer([1]), epoch=Epoch(5)), [0], ids(0))
    for peer in (with_shard(owner.peer([1]), block_ids=tuple(ids(n))) for n in (8, -1)):
        with pytest.raises(TransferError, match="outside"):
            client.pull(peer, [0], ids(0))
    with pytest.raises(TransferError, match="outside"):
        client.pull(owner.peer([1]), [1], ids(0))
    with pytest.raises(MiniInferError, match="no transport"):
        client.pull(with_address(owner.peer([1]), shm=None), [0], ids(0))
    assert not mine.any()
    owner.close()


def test_a_mapping_is_kept_until_the_worker_lives_again(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    mine = empty_pool()
    transport = ShmReader(mine, LeaseClient())
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        transport.pull(pull_of_one(owner.peer([1])))
    assert len(transport._mappings._found) == 1
    owner.close()
    transport.pull(pull_of_one(owner.peer([2])))  # no socket needed any more
    np.testing.assert_array_equal(mine[0], owner.blocks[2])
    reborn = Owner(tmp_path, seed=1)
    transport.pull(pull_of_one(reborn.peer([2])))
    assert len(transport._mappings._found) == 1
    np.testing.assert_array_equal(mine[0], reborn.blocks[2])
    transport.close()
    reborn.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 1)


def test_a_peer_whose_blocks_lie_in_gpu_memory_is_not_read_without_its_wing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "from_wing", lambda path: None)
    owner, client = Owner(tmp_path), host_client(GEOMETRY, empty_pool(), names=["shm"])
    with pytest.raises(TransferError, match=r"needs worker\.gpu_hand_off"):
        client.pull(with_address(owner.peer([3]), needs_staging=True), [0], ids(0))
    client.close()
    owner.close()
