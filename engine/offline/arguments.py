"""Checks of what callers of the Python API pass. Knows nothing of the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field
from operator import index
from typing import Any

from common.errors import ConfigError, InvalidRequestError
from engine.request import SamplingParams

Prompt = str | Sequence[int]  # text, or token ids as they are
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
_KINDS = {bool: "True or False", int: "an integer", float: "a number", str: "a text"}


def checked_setting(name: str, value: Any, declared: Field[Any]) -> Any:
    """Return the value of a setting. Raises ConfigError for one of another type, or that is no choice."""
    kind = type(declared.default)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    is_kind = isinstance(value, int | float if kind is float else kind)
    if not is_kind or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} must be {_KINDS[kind]}, not {value!r}")
    choices = declared.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{name} {value!r}: choose one of {', '.join(choices)}")
    return value


def prompt_list(prompts: Any) -> list[str | list[int]]:
    """Return one or several prompts as a list. Raises InvalidRequestError for what is neither text nor token ids."""
    if isinstance(prompts, str):
        return [_prompt(prompts)]
    found = _items(prompts)
    if found and _is_token_id(found[0]):
        return [_prompt(found)]
    return [_prompt(prompt) for prompt in found]


def _is_token_id(found: Any) -> bool:
    """Whether it is an integer, of numpy or torch, too, whose arrays are none."""
    try:
        index(found)
    except TypeError:
        return False
    return True


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    try:
        return [index(token_id) for token_id in _items(prompt)]
    except TypeError:
        raise InvalidRequestError("a prompt's token ids must be integers", "prompt") from None


def _items(prompt: Any) -> list[Any]:
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__iter__"):
        what = f"a prompt is a text or a list of token ids, not {type(prompt).__name__}"
        raise InvalidRequestError(what, "prompt")
    return list(prompt)


def params_list(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Return the parameters of each prompt. Raises InvalidRequestError for others, or another number of them."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    found = list(params) if isinstance(params, Sequence) else [params]
    if not all(isinstance(each, SamplingParams) for each in found):
        raise InvalidRequestError("params must be SamplingParams, for all prompts or a list of them", "params")
    if len(found) != num_prompts:
        raise InvalidRequestError(f"{num_prompts} prompts but {len(found)} sampling parameters", "params")
    return found


def message_list(messages: Any) -> list[Message]:
    """Return a conversation's messages. Raises InvalidRequestError for what is no list of them."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages or not all(isinstance(message, Mapping) for message in messages):
        what = "messages must be one conversation, a list such as [{'role': 'user', 'content': '...'}]"
        raise InvalidRequestError(what, "messages")
    return [{**message, **_for_template(message, f"messages.{n}")} for n, message in enumerate(messages)]


def _for_template(message: Message, where: str) -> dict[str, Any]:
    """Return the fields in the form that chat templates expect, as routers do: a text, arguments as an object."""
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} has no role", f"{where}.role")
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ["" if content is None else content]
    texts: list[Any] = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"{where}.content must be a text or a list of text parts", f"{where}.content")
    made: dict[str, Any] = {"content": "\n".join(texts)}
    if calls := message.get("tool_calls"):
        if not all(isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls):
            raise InvalidRequestError(f"{where}.tool_calls must hold calls of functions", f"{where}.tool_calls")
        made["tool_calls"] = [{**call, "function": _call(call["function"])} for call in calls]
    return made


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    with suppress(ValueError):  # else it is shown as the model wrote it
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**function, "arguments": arguments}


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Return stop strings as a tuple. Raises InvalidRequestError for an empty one, which is everywhere."""
    is_several = isinstance(stop, Collection) and not isinstance(stop, str)
    stops = tuple(stop) if is_several else () if stop is None else (stop,)
    if not all(isinstance(each, str) for each in stops):
        raise InvalidRequestError("stop must be a text or a list of texts", "stop")
    if not all(stops):
        raise InvalidRequestError("a stop string must not be empty", "stop")
    return stops
