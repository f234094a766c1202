"""Schemas of the bodies of POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from router.api.schemas import MAX_MESSAGES, Body, Label, TokenIdField
from router.message_parts.messages import Message, check_messages
from router.template_options.fields import TemplateKwargs


class TokenizeBody(Body):
    """POST /tokenize. tools: as a chat completion takes them, which checks them."""

    model: Label | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", "prompt")
        if self.messages is not None:
            check_messages(self.messages)
        elif self.tools:
            raise InvalidRequestError("tools need messages", "tools")
        return self

    @property
    def chat_fields(self) -> dict[str, Any]:
        """The fields of the chat completion with this conversation as its prompt."""
        messages = [message.model_dump(exclude_unset=True) for message in self.messages or ()]
        return {
            "messages": messages,
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
            **({"tools": self.tools} if self.tools else {}),
        }


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: Label | None = None
    tokens: list[TokenIdField]
