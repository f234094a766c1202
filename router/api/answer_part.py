"""What a feature takes out of answers' texts, and where it puts that in the JSON of a chat message.

Tool calls are such a part (`router/tools/tool_part.py`). Each request that asks for a part has one of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

from router.api.results import ChoiceResult
from router.api.text import TextStage, Update


class AnswerPart(Protocol):
    """A part of chat messages other than their content."""

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens whose texts the stage reads, and content never shows."""

    def grammar(self, answer: str, prompt_token_ids: list[int]) -> str:
        """Return the grammar of texts with this part in them whose content follows `answer`; empty: any text."""

    def stage(self, prompt_token_ids: list[int]) -> TextStage:
        """Return what takes this part out of the text of one choice."""

    def delta(self, index: int, update: Update | ChoiceResult) -> dict[str, Any]:
        """Return this part's fields in a chunk of choice `index`; empty when there is nothing new."""

    def message(self, result: ChoiceResult) -> dict[str, Any]:
        """Return this part's fields in the message of an answer in one piece."""

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        """Return the reason to tell clients for an end of choice `index` that workers call `reason`."""
