"""Tokenizes messages and prompts: all code after this sees only token ids.

Long texts are encoded on a thread, so that open streams continue meanwhile. Raises InvalidRequestError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from common.errors import ContextLengthError, InvalidRequestError
from common.text.chat_template import TemplateUse
from common.text.tokenizer import Tokenizer
from router.api.schemas import Message
from router.workers.model_workers import ModelLimits

INLINE_CHARS = 8_192  # about 2 ms; longer texts are encoded on a thread
MAX_CHARS_PER_TOKEN = 128  # a text with more characters than this times the context cannot fit


async def chat_prompt(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    limits: ModelLimits,
    use: TemplateUse,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return a conversation's token ids by the chat template. Raises InvalidRequestError for an empty prompt."""
    plain = [message.for_template() for message in messages]
    num_chars = sum(len(message["content"]) for message in plain) + (len(orjson.dumps(tools)) if tools else 0)
    _refuse_hopeless(num_chars, limits, "messages")

    def encode() -> list[int]:
        return tokenizer.apply_chat_template(plain, tools, use)

    token_ids = await _maybe_on_thread(encode, num_chars)
    if not token_ids:
        raise InvalidRequestError("the messages give an empty prompt", "messages")
    return token_ids


async def text_prompt(
    text: str, tokenizer: Tokenizer, limits: ModelLimits, add_special_tokens: bool = True, param: str = "prompt"
) -> list[int]:
    """Return the token ids of one text. Special tokens are allowed: all of it is the client's. param: its field."""
    _refuse_hopeless(len(text), limits, param)
    token_ids = await _maybe_on_thread(lambda: tokenizer.encode(text, add_special_tokens, True), len(text))
    if not token_ids:
        raise InvalidRequestError(f"the {param} is empty", param)
    return token_ids


def _refuse_hopeless(num_chars: int, limits: ModelLimits, param: str) -> None:
    if num_chars > limits.max_model_len * MAX_CHARS_PER_TOKEN:
        raise ContextLengthError(
            limits.max_model_len,
            f"your {param} has {num_chars} characters, which cannot fit. Please reduce the length of the {param}",
            param,
        )


async def _maybe_on_thread(encode: Callable[[], list[int]], num_chars: int) -> list[int]:
    if num_chars <= INLINE_CHARS:
        return encode()
    return await asyncio.to_thread(encode)
