"""Stored responses in this router's memory, for later requests; the least recently used are evicted first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from common.errors import NotFoundError
from router.responses_api.output import DeltaLengths

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, which takes a tenth of the memory that its objects would."""

    item_ids: tuple[str, ...]  # of the output
    response: bytes
    messages: bytes  # of the conversation, with this response's output
    input_items: bytes
    delta_lengths: bytes  # of the output items

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages) + len(self.input_items) + len(self.delta_lengths)


class ResponseStore:
    """Responses by id, with a maximum number and size."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._response_of: dict[str, str] = {}  # ids of output items -> of their responses
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(
        self,
        response: dict[str, Any],
        messages: list[dict[str, Any]],
        items: list[dict[str, Any]],
        delta_lengths: DeltaLengths,
    ) -> None:
        """Store a response, replacing one with the same id."""
        if response["id"] in self._stored:
            self.delete(response["id"])
        item_ids = tuple(item["id"] for item in response["output"])
        as_json = (orjson.dumps(part) for part in (response, messages, items, delta_lengths))
        stored = StoredResponse(item_ids, *as_json)
        self._stored[response["id"]] = stored
        self._response_of |= dict.fromkeys(item_ids, response["id"])
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse:
        """Return a response. Raises NotFoundError."""
        stored = self._stored.get(response_id)
        if stored is None:
            raise NotFoundError(
                f"no response {response_id[:64]!r}: it was not stored, is gone, or another router has it"
            )
        self._stored.move_to_end(response_id)
        return stored

    def delete(self, response_id: str) -> None:
        """Delete a response. Raises NotFoundError."""
        stored = self.get(response_id)
        self.num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            del self._response_of[item_id]
        del self._stored[response_id]

    def item(self, item_id: str) -> dict[str, Any]:
        """Return an output item of a response. Raises NotFoundError."""
        response_id = self._response_of.get(item_id)
        if response_id is None:
            what = f"no item {item_id[:64]!r}"
            raise NotFoundError(f"{what}: its response was not stored, is gone, or another router has it")
        stored = self.get(response_id)
        item: dict[str, Any] = orjson.loads(stored.response)["output"][stored.item_ids.index(item_id)]
        return item
