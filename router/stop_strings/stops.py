"""Ends a choice at a stop string in its text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from pydantic import Field

from common.text.detokenizer import Detokenizer
from common.text.stop_strings import StopStringMatcher
from router.api.schemas import MAX_STOP_CHARS, MAX_STOPS, Body, GenerationBody, StopString
from router.api.text import NewTextEnd, Update


class StopFields(Body):
    """Request field with stop strings."""

    stop: Annotated[
        StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None,
        Field(description=f"a text or at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARS} characters"),
    ] = None


def text_end_of(body: GenerationBody) -> NewTextEnd | None:
    """Return the constructor of StopStrings for a request that gives some, else None."""
    if not isinstance(body, StopFields) or not body.stop:
        return None
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    return partial(StopStrings, stops, bool(body.include_stop_str_in_output), body.min_tokens or 0)


class StopStrings:
    """Stop strings of one choice. They are ignored in its first `min_tokens` tokens."""

    def __init__(self, stops: Sequence[str], include_in_output: bool, min_tokens: int) -> None:
        self._matcher = StopStringMatcher(stops, include_in_output)
        self._min_tokens = min_tokens

    def push(self, detokenizer: Detokenizer, token_ids: list[int], num_before: int, update: Update) -> None:
        """Push token by token; drop the tokens after the one that completes a stop string."""
        matcher = self._matcher
        pieces: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            text = detokenizer.push((token_id,))
            if num_before + count <= self._min_tokens:
                pieces.append(matcher.skip(text))
                continue
            pieces.append(matcher.push(text))
            if matcher.match is not None:
                self._stop_at(count, update)
                break
        else:
            if update.finish_reason is not None:
                pieces.append(matcher.push(detokenizer.finish()))
                if matcher.match is not None:
                    self._stop_at(len(update.token_ids), update)
                pieces.append(matcher.flush())
        update.text = "".join(pieces)

    def _stop_at(self, num_tokens: int, update: Update) -> None:
        del update.token_ids[num_tokens:]
        update.logprobs = update.logprobs[:num_tokens]
        update.finish_reason = "stop"
        update.stop_reason = self._matcher.match
