"""The event log's numbers, and its snapshot."""

from common.token_ids import pack_ids
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.pool.events import EventLog
from protos import types_pb2 as pb

KEYS = block_keys(root_key("model"), pack_ids(range(6)), 1)


def test_numbers_are_consecutive_and_a_snapshot_takes_none() -> None:
    log = EventLog()
    assert log.snapshot() == pb.KvEvent(sequence=0, snapshot=pb.BlockKeys())
    assert log.append([], []) == []
    assert log.append(KEYS[:2], []) == [pb.KvEvent(sequence=1, stored=pb.BlockKeys(keys=KEYS[:2]))]
    assert log.append([KEYS[2]], [KEYS[0]]) == [
        pb.KvEvent(sequence=2, removed=pb.BlockKeys(keys=[KEYS[0]])),
        pb.KvEvent(sequence=3, stored=pb.BlockKeys(keys=[KEYS[2]])),
    ]
    assert log.snapshot() == pb.KvEvent(sequence=3, snapshot=pb.BlockKeys(keys=KEYS[1:3]))
    assert log.append([KEYS[3]], [])[0].sequence == 4
    assert len(log.snapshot().snapshot.keys) == 3
