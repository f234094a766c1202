"""Prompts that end with their final message, which the model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequestError
from common.text.chat_template import TemplateUse

_END_OF_FINAL_MESSAGE = "\ue83e\ue9a1"


class ContinuedMessage(TemplateUse):
    """Cuts off everything that the template writes after the text of the final message."""

    def before(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        last = messages[-1]
        content = last.get("content")
        if last.get("role") != "assistant" or not isinstance(content, str):
            raise InvalidRequestError(
                "continue_final_message needs a final assistant message with text", "continue_final_message"
            )
        return [*messages[:-1], {**last, "content": f"{content}{_END_OF_FINAL_MESSAGE} "}]

    def after(self, text: str) -> str:
        text, mark, after = text.rpartition(_END_OF_FINAL_MESSAGE)
        if not mark:
            raise InvalidRequestError(
                "continue_final_message: the model's chat template does not show the final message",
                "continue_final_message",
            )
        return text if after.startswith(" ") else text.rstrip()  # a template that trims texts trims this one, too
