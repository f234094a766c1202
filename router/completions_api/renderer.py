"""Renders the JSON of `/v1/completions`: `text_completion`, both for chunks and whole answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import orjson

from common.text.tokenizer import Tokenizer
from protos import types_pb2 as pb
from router.answer_details.details import finite, token_name
from router.api.render import PlainChunks, Renderer, RenderOptions
from router.api.text import ChoiceResult, Update, Usage
from router.completions_api.bodies import CompletionBody


class _TextOffsets:
    """Offsets of tokens in the text of one choice: each that of the character which the token begins or continues.

    The text decides, not the tokens' own bytes: special tokens that are skipped add no characters.
    """

    def __init__(self, tokenizer: Tokenizer, shown: str, prompt_token_ids: Sequence[int], skip_special: bool) -> None:
        """shown: the prompt's text at the beginning of the choice's; empty: none."""
        self.of_prompt: list[int] = []
        self._length = 0
        if shown:
            self._detokenizer = tokenizer.detokenizer(skip_special=False)
            self.of_prompt = self.take(prompt_token_ids)
        self._detokenizer = tokenizer.detokenizer(skip_special, continues=True)
        self._length = len(shown)

    def take(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the choice's next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            self._length += len(self._detokenizer.push([token_id]))
        return offsets


class CompletionRenderer(Renderer):
    """Renders the best `n` choices for each prompt."""

    def __init__(
        self,
        options: RenderOptions,
        tokenizer: Tokenizer,
        body: CompletionBody,
        prompts: Sequence[list[int]],
        shown: Sequence[str | Sequence[int]],
    ) -> None:
        """shown: prompts to echo at the beginning of texts, as the client gave them; empty: none."""
        super().__init__(options, tokenizer, "text_completion")
        self._body = body
        self._prompts = prompts
        self._has_logprobs = body.logprobs is not None
        decode = partial(tokenizer.decode, skip_special=False)
        self._shown = [each if isinstance(each, str) else decode(each) for each in shown]
        self._prompt_logprobs: dict[int, Sequence[pb.TokenLogprobs]] = {}  # by prompt; only its first choice has them
        is_plain = not (self._has_logprobs or body.return_token_ids or options.continuous_usage or shown)
        self._plain = PlainChunks(self._head, b'"text":', b"", options.include_usage) if is_plain else None
        self._offsets: dict[int, _TextOffsets | None] = {}  # of choices that have begun

    def chunk(self, index: int, update: Update | ChoiceResult, usage: Usage) -> bytes:
        if self._plain is not None and update.finish_reason is None:
            return self._plain.render(index, update.text)
        is_first = index not in self._offsets
        text = update.text
        prompt_index = index // self._body.per_prompt
        if is_first:
            self._take_prompt_logprobs(prompt_index, update)
            text = self._begin(prompt_index) + text
            self._offsets[index] = self._new_offsets(prompt_index)
        choice = self._choice(index, text, update, self._offsets[index], prompt_index if is_first else None)
        if is_first and self._body.return_token_ids:
            choice["prompt_token_ids"] = self._prompts[prompt_index]
        return self._event(choice, usage)

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        choices = []
        per_prompt = self._body.per_prompt
        for result in results:
            self._take_prompt_logprobs(result.index // per_prompt, result)
        for prompt_index, result in best_results(results, per_prompt, self._body.n or 1):
            text = self._begin(prompt_index) + result.text
            choice = self._choice(result.index, text, result, self._new_offsets(prompt_index), prompt_index)
            choice["stop_reason"] = result.stop_reason
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = self._prompts[prompt_index]
            choices.append(choice)
        return orjson.dumps({**self._head, "choices": choices, "usage": usage.as_dict()})

    def _new_offsets(self, prompt_index: int) -> _TextOffsets | None:
        """Return the offsets of a choice that begins; None if the answer has none."""
        if not self._has_logprobs:
            return None
        skip_special = self._body.skip_special_tokens is not False
        return _TextOffsets(self._tokenizer, self._begin(prompt_index), self._prompts[prompt_index], skip_special)

    def _choice(
        self, index: int, text: str, update: Update | ChoiceResult, offsets: _TextOffsets | None,
        prompt_index: int | None,
    ) -> dict[str, Any]:  # fmt: skip
        """prompt_index: given only where the choice's text begins, where echo shows the prompt."""
        choice: dict[str, Any] = {
            "index": index, "text": text, "logprobs": None, "finish_reason": update.finish_reason,
        }  # fmt: skip
        if offsets is not None:
            shows_prompt = bool(self._shown) and prompt_index is not None
            before = self._prompt_items(prompt_index or 0) if shows_prompt else []
            choice["logprobs"] = self._logprobs([*before, *update.logprobs])
            own = offsets.take(item.token_id for item in update.logprobs)
            choice["logprobs"]["text_offset"] = [*offsets.of_prompt[: len(before)], *own]
            if shows_prompt:  # the first token has no logprob, since nothing comes before it
                choice["logprobs"]["token_logprobs"][0] = None
                choice["logprobs"]["top_logprobs"][0] = None
        if update.stop_reason is not None:
            choice["stop_reason"] = update.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = update.token_ids
        return choice

    def _begin(self, prompt_index: int) -> str:
        return self._shown[prompt_index] if self._shown else ""

    def _take_prompt_logprobs(self, prompt_index: int, update: Update | ChoiceResult) -> None:
        if update.prompt_logprobs:
            self._prompt_logprobs[prompt_index] = update.prompt_logprobs

    def _prompt_items(self, prompt_index: int) -> list[pb.TokenLogprobs]:
        """Build one entry per prompt token; workers may leave out the first one, which has no logprob."""
        token_ids, items = self._prompts[prompt_index], self._prompt_logprobs.get(prompt_index, ())
        known = items[len(items) - (len(token_ids) - 1) :] if items else []
        return [pb.TokenLogprobs(token_id=token_ids[0]), *known]

    def _logprobs(self, items: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        tokens: list[str] = []
        tops: list[dict[str, float] | None] = []
        for item in items:
            token = self._name(item.token_id)
            tokens.append(token)
            top = {
                self._name(token_id): finite(logprob)
                for token_id, logprob in zip(item.top_token_ids, item.top_logprobs, strict=True)
            }
            top.setdefault(token, finite(item.logprob))
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(item.logprob) for item in items],
            "top_logprobs": tops,
        }

    def _name(self, token_id: int) -> str:
        return token_name(self._body, self._tokenizer, token_id)


def best_results(results: Sequence[ChoiceResult], per_prompt: int, n: int) -> list[tuple[int, ChoiceResult]]:
    """Return the n choices of each prompt with the best mean logprob, numbered anew, and the index of the prompt."""
    kept: list[tuple[int, ChoiceResult]] = []
    for prompt_index, first in enumerate(range(0, len(results), per_prompt)):
        group = list(results[first : first + per_prompt])
        if per_prompt > n:
            group.sort(key=_mean_logprob, reverse=True)
        for result in group[:n]:
            result.index = len(kept)
            kept.append((prompt_index, result))
    return kept


def _mean_logprob(result: ChoiceResult) -> float:
    """Compute the score for best_of; a choice without tokens has the worst."""
    return sum(item.logprob for item in result.logprobs) / len(result.logprobs) if result.logprobs else -math.inf
