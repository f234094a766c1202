"""Protocol between a worker and the node agent, without the socket: requests and replies are lists.

    ["hello", content_name, block_bytes] -> ["ok", num_slots] and the region's descriptor; once, first. The cells
                                            of its `KeyFilter` follow the slots
    ["lookup", keys]                     -> ["ok", slots], pinned
    ["missing", keys]                    -> ["ok", keys]
    ["reserve", keys or nil]             -> ["ok", slots or nil], pinned
    ["commit", slots], ["unpin", slots]  -> ["ok", nil]
    ["check"]                            -> ["ok", inconsistencies, or nil]
    any error                            -> ["error", message]; the connection ends

A `TierSession` is one connection: it tracks what the worker has pinned, refuses other slots, and unpins all of them
when the worker is gone. Committed blocks stay.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from common.errors import InvalidRequestError
from kvstore.tier.host_tier import HostTierAllocator
from kvstore.types import BlockKey, HostSlot

KEY_BYTES = 32
MAX_ITEMS = 1 << 16  # keys or slots in one request
MAX_FRAME_BYTES = 4 << 20
MAX_BLOCK_BYTES = 1 << 32
MAX_NAME_CHARS = 4096


def parse_hello(message: Any) -> tuple[str, int]:
    """Return (content_name, block_bytes) of a worker's first request. Raises InvalidRequestError."""
    match message:
        case ["hello", str() as content_name, int() as block_bytes] if (
            len(content_name) <= MAX_NAME_CHARS and 0 < block_bytes <= MAX_BLOCK_BYTES
        ):
            return content_name, block_bytes
    raise InvalidRequestError("the first request of a worker must be a hello")


class TierSession:
    """One worker's use of one region."""

    def __init__(self, tier: HostTierAllocator) -> None:
        self._tier = tier
        self._pins: Counter[HostSlot] = Counter()

    def handle(self, message: Any) -> list[Any]:
        """Return the reply to one request. Raises InvalidRequestError, without having changed anything."""
        match message:
            case ["lookup", list() as items]:
                return ["ok", self._pinned(self._tier.lookup(_keys(items)))]
            case ["missing", list() as items]:
                return ["ok", self._tier.missing(_keys(items))]
            case ["reserve", list() as items]:
                slots = self._tier.reserve(_optional_keys(items))
                return ["ok", None if slots is None else self._pinned(slots)]
            case ["commit", list() as items]:
                self._tier.commit(self._own(items))
                return ["ok", None]
            case ["unpin", list() as items]:
                slots = self._own(items)
                self._tier.unpin(slots)
                self._pins.subtract(slots)
                self._pins = +self._pins  # drops zeros
                return ["ok", None]
            case ["check"]:
                return ["ok", self._check()]
        raise InvalidRequestError("unknown request")

    def close(self) -> None:
        """Release all pins in sequence order, so that the last slots are evicted first."""
        self._tier.unpin(list(self._pins.elements()))
        self._pins.clear()

    def _pinned(self, slots: list[HostSlot]) -> list[HostSlot]:
        self._pins.update(slots)
        return slots

    def _own(self, items: list[Any]) -> list[HostSlot]:
        if len(items) > MAX_ITEMS or not all(type(item) is int for item in items):
            raise InvalidRequestError("malformed slots")
        for slot, count in Counter(items).items():
            if count > self._pins[HostSlot(slot)]:
                raise InvalidRequestError("a slot that this worker did not pin")
        return [HostSlot(item) for item in items]

    def _check(self) -> str | None:
        try:
            self._tier.check_integrity()
        except AssertionError as error:
            return str(error)
        return None


def _keys(items: list[Any]) -> list[BlockKey]:
    if any(item is None for item in items):
        raise InvalidRequestError("malformed keys")
    return [key for key in _optional_keys(items) if key is not None]


def _optional_keys(items: list[Any]) -> list[BlockKey | None]:
    good = all(item is None or (isinstance(item, bytes) and len(item) == KEY_BYTES) for item in items)
    if len(items) > MAX_ITEMS or not good:
        raise InvalidRequestError("malformed keys")
    return [None if item is None else BlockKey(item) for item in items]
