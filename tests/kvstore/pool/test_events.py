"""The event log's numbers, its snapshot, and its messages."""

from common.token_ids import pack_ids
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.pool.events import CacheEvent, EventLog, to_proto
from protos import types_pb2

KEYS = block_keys(root_key("model"), pack_ids(range(6)), 1)


def test_numbers_are_consecutive_and_a_snapshot_takes_none() -> None:
    log = EventLog()
    assert log.append([], []) == []
    assert log.append(KEYS[:2], []) == [CacheEvent(1, "stored", tuple(KEYS[:2]))]
    assert log.append([KEYS[2]], [KEYS[0]]) == [
        CacheEvent(2, "removed", (KEYS[0],)),
        CacheEvent(3, "stored", (KEYS[2],)),
    ]
    assert log.snapshot() == CacheEvent(3, "snapshot", (KEYS[1], KEYS[2]))
    assert log.append([KEYS[3]], [])[0].sequence == 4
    assert len(log.snapshot().keys) == 3


def test_events_survive_the_wire() -> None:
    log = EventLog()
    for event in [*log.append(KEYS, []), *log.append([], KEYS[:1]), log.snapshot(), CacheEvent(0, "snapshot", ())]:
        message = types_pb2.KvEvent.FromString(to_proto(event).SerializeToString())
        kind = message.WhichOneof("kind")
        assert CacheEvent(message.sequence, kind, tuple(getattr(message, kind).keys)) == event
