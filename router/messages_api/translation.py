"""Converts a Messages request to the fields of a chat completion. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any

import orjson

from common.errors import InvalidRequestError
from common.text.tokenizer import Tokenizer
from router.messages_api.schemas import (
    AnyBlock,
    InputMessage,
    MessagesBody,
    PromptBody,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLOCKS: dict[str, tuple[type[AnyBlock], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
_PROBE = "one system message"
_BILLING_LABEL = "x-anthropic-billing-header:"
# Patterns of a chat completion's fields, and the fields of this API that they come from.
_NAMES = (
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^chat_template_kwargs\.enable_thinking$", "thinking"),
    (r"^reasoning_effort$", "output_config.effort"),
    (r"^tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
    (r"^tools\.(\d+)\.function", r"tools.\1"),
)


@cache
def takes_system_messages(tokenizer: Tokenizer) -> bool:
    """Whether the model's chat template shows a system message that follows others."""
    said = [("user", "a"), ("system", _PROBE), ("assistant", "b"), ("user", "c")]
    try:
        token_ids = tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in said])
    except InvalidRequestError:  # some templates refuse it, others leave it out
        return False
    return _PROBE in tokenizer.decode(token_ids)


def chat_fields(body: PromptBody, takes_system: bool = True) -> dict[str, Any]:
    """Return the chat completion's body for a request. Raises InvalidRequestError.

    takes_system: see `takes_system_messages`; if not, these messages become parts of the user's.
    """
    system = _system(body)
    messages = [
        *([{"role": "system", "content": system}] if system else []),
        *chain.from_iterable(_chat_messages(body, takes_system)),
    ]
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.messages[-1].role == "assistant":  # the answer continues its text
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
        if (wanted := body.output_config.format) is not None:
            schema = {"name": "answer", "schema": wanted.content, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "user": None if body.metadata is None else body.metadata.user_id,
        }
    return fields


def client_field(body: PromptBody, takes_system: bool, param: str) -> str:
    """Return the client's field that a field of the chat completion comes from."""
    head, *path = param.split(".")
    if head == "messages" and path:
        index = int(path[0]) - bool(_system(body))
        ends = accumulate(map(len, _chat_messages(body, takes_system)))
        return f"messages.{next((i for i, end in enumerate(ends) if index < end), 0)}"
    for pattern, name in _NAMES:
        param = re.sub(pattern, name, param)
    return param


def _choice(choice: ToolChoice) -> dict[str, Any]:
    is_parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type != "tool":
        return {"tool_choice": _CHOICES[choice.type], **is_parallel}
    if choice.name is None:
        raise InvalidRequestError("tool_choice of type tool needs a name", "tool_choice.name")
    return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **is_parallel}


def _system(body: PromptBody) -> str:
    """Return the system prompt without the label that Claude Code puts first: it differs between requests, so that no
    prompt would begin as one whose KV is cached."""
    if body.system is None or isinstance(body.system, str):
        return body.system or ""
    return _text([block for block in body.system if not block.text.startswith(_BILLING_LABEL)])


def _chat_messages(body: PromptBody, takes_system: bool) -> list[list[dict[str, Any]]]:
    """Return the chat messages for each message."""
    made = [list(_messages(message, f"messages.{index}.content")) for index, message in enumerate(body.messages)]
    last = max((index for index, message in enumerate(body.messages) if message.role == "user"), default=-1)
    for index, message in enumerate(body.messages):
        if message.clear_at is not None and message.role != "system":
            raise InvalidRequestError("only system messages have clear_at", f"messages.{index}.clear_at")
        if message.clear_at == "next_user_message" and index < last:
            made[index] = []
    for edit in (body.context_management and body.context_management.edits) or ():
        if edit.num_kept is not None:
            _clear_thinking(made, edit.num_kept)
    if not takes_system:
        _tell_as_user(made, is_first_kept=not _system(body))
    return made


def _tell_as_user(made: Sequence[list[dict[str, Any]]], is_first_kept: bool) -> None:
    """Turn system messages into texts of the user, and join the user's texts next to them, as templates expect."""
    before: dict[str, Any] = {"role": ""}
    for index, messages in enumerate(made):
        for message in list(messages):
            if message["role"] == "system" and not (is_first_kept and index == 0):
                text = f"<system-reminder>\n{message['content']}\n</system-reminder>"
                message |= {"role": "user", "content": text}
            if message["role"] == before["role"] == "user":
                before["content"] += f"\n\n{message['content']}"
                messages.remove(message)
            else:
                before = message


def _clear_thinking(made: Sequence[Sequence[dict[str, Any]]], num_kept: int) -> None:
    """Leave out the reasoning of all but the last turns that have some. A turn ends where the user says something."""
    num_turns, is_counted = 0, False
    for message in chain.from_iterable(reversed([list(reversed(messages)) for messages in made])):
        if message["role"] == "user":
            is_counted = False
        elif "reasoning_content" in message:
            num_turns, is_counted = num_turns + (not is_counted), True
            if num_turns > num_kept:
                del message["reasoning_content"]


def _messages(message: InputMessage, where: str) -> Iterator[dict[str, Any]]:
    """Yield the chat messages for one message: first the tool results in it, then its text."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    blocks = message.content
    for index, block in enumerate(blocks):
        if not isinstance(block, _BLOCKS[message.role]):
            raise InvalidRequestError(f"{where}.{index}: no {block.type} in {message.role} messages", where)
        if isinstance(block, ToolResultBlock):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    if message.role != "assistant":
        if texts:
            yield {"role": message.role, "content": _text(texts)}
        return
    yield _assistant(blocks, texts)


def _assistant(blocks: Sequence[AnyBlock], texts: Sequence[TextBlock]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": _text(texts)}
    thinking = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if thinking:
        made["reasoning_content"] = thinking
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": orjson.dumps(block.input).decode()},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        made["tool_calls"] = calls
    return made


def _result(block: ToolResultBlock) -> str:
    text = _text(block.content)
    return f"Error: {text}" if block.is_error else text


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
