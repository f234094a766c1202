"""Schemas of the bodies of POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from router.api.schemas import MAX_MESSAGES, Body, Label, TokenIdField
from router.message_parts.messages import Message, check_messages
from router.template_options.fields import TemplateKwargs


class TokenizeBody(Body):
    """POST /tokenize"""

    model: Label | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", "prompt")
        if self.messages is not None:
            check_messages(self.messages)
        return self


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: Label | None = None
    tokens: list[TokenIdField]
