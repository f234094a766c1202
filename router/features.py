"""Optional parts of a request: an answer in a given format (`router/grammar`), and tools (`router/tools`).

The one file that names them: bodies with their fields, what these ask for, and what this makes of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.text.tokenizer import Tokenizer
from router.api import schemas
from router.api.chat_renderer import ChatRenderer
from router.api.text import ChoiceText, StopRules
from router.grammar.answer_format import CHECKS, AnswerFields, answer_grammar
from router.tools.tool_renderer import ToolChatRenderer
from router.tools.tool_use import ToolText, ToolUse, tool_use
from router.tools.tools import ToolFields


class ChatCompletionBody(schemas.ChatCompletionBody, ToolFields):
    """POST /v1/chat/completions"""


class CompletionBody(schemas.CompletionBody, AnswerFields):
    """POST /v1/completions"""


def num_known_grammars() -> int:
    """Grammars that this process remembers."""
    return len(CHECKS)


@dataclass(frozen=True, slots=True)
class Features:
    """What one request asks for."""

    grammar: str = ""  # that answers follow; empty: none
    tools: ToolUse | None = None

    @classmethod
    async def of(cls, body: ChatCompletionBody | CompletionBody, num_choices: int, tokenizer: Tokenizer) -> Features:
        """Raises InvalidRequestError for what cannot be done."""
        if isinstance(body, ToolFields):
            tools = await tool_use(body, num_choices, tokenizer)
            if tools is not None:
                return cls(tools.grammar, tools)
        return cls(await answer_grammar(body.response_format, body.structured_outputs, num_choices))

    @property
    def descriptions(self) -> list[dict[str, Any]] | None:
        """Of tools, for the chat template."""
        return None if self.tools is None else self.tools.descriptions

    @property
    def renderer(self) -> type[ChatRenderer]:
        return ChatRenderer if self.tools is None else ToolChatRenderer

    def text(
        self, tokenizer: Tokenizer, rules: StopRules, continues: bool, has_logprobs: bool, skip_special: bool
    ) -> ChoiceText:
        """The text of one choice."""
        if self.tools is not None:
            return ToolText(self.tools, tokenizer, rules, has_logprobs, skip_special)
        return ChoiceText(tokenizer, rules, continues, has_logprobs, skip_special)
