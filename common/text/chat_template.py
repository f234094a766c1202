"""Renders a model's chat template in a sandbox, so that no message can forge the template's markup.

Templates come from the model's files or the operator, never from clients. The text of a special token inside a
message is broken up with a character that occurs nowhere in the request; the tokenizer removes it after it has found
the template's own special tokens. Knows nothing of token ids.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequestError, UnsupportedModelError

_PRIVATE_USE_START, _PRIVATE_USE_COUNT = 0xF0000, 0xFFFE
# What templates raise on messages that they were not written for.
_TEMPLATE_FAILURES = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
NO_TEXT = "(?!)"  # a pattern that matches nothing


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; here it is replaced by its body, a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise InvalidRequestError(f"the model's chat template refuses these messages: {message}", "messages")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as transformers' filter does: Jinja's own escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@lru_cache(maxsize=32)
def _compiled(source: str) -> tuple[Template, frozenset[str]]:
    """Compile a template, which keeps no state between renderings; return it and the variables that it reads."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source), frozenset(meta.find_undeclared_variables(environment.parse(source)))


@dataclass(frozen=True, slots=True)
class TemplateUse:
    """How to apply a template to a conversation. `router/template_options` has another way.

    variables: variables of the template in addition to the standard ones, such as `enable_thinking`.
    """

    add_generation_prompt: bool = True  # the prompt ends with the beginning of an answer
    variables: Mapping[str, Any] = field(default_factory=dict)

    def before(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the messages to render."""
        return messages

    def after(self, text: str) -> str:
        """Return the prompt's text from the rendered text."""
        return text


NEW_ANSWER = TemplateUse()


class ChatTemplate:
    """A compiled template with the special tokens that it may use by name (`bos_token`, ...)."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], special_texts: Sequence[str]) -> None:
        try:
            self._template, self.variables = _compiled(source)
        except TemplateSyntaxError as error:
            raise UnsupportedModelError(f"the model's chat template does not compile: {error}") from None
        self._named_tokens = dict(named_tokens)
        self._guard = _MarkupGuard(special_texts)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        use: TemplateUse,
    ) -> tuple[str, str]:
        """Return the prompt's text and the break character in it ("" when no message needed one).

        Raises InvalidRequestError when the template cannot be applied to these messages.
        """
        try:
            (messages, tools, variables), breaker = self._guard.apply((use.before(messages), tools, use.variables))
        except RecursionError:  # from the arguments of a tool call, which a model may have written
            raise InvalidRequestError("the messages hold JSON that is nested too deep", "messages") from None
        standard = {
            **self._named_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": use.add_generation_prompt,
        }
        if conflicts := sorted(standard.keys() & variables):
            raise InvalidRequestError(f"chat_template_kwargs: {conflicts[0]} cannot be set", "chat_template_kwargs")
        try:
            text = self._template.render({**variables, **standard})
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequestError(
                f"the model's chat template cannot be applied to these messages ({type(error).__name__})",
                "messages",
            ) from None
        if breaker:
            text = text.replace(_escaped(breaker), breaker)
        return use.after(text), breaker


class _MarkupGuard:
    """Breaks up special tokens' texts inside strings, also those that two adjacent strings could form."""

    def __init__(self, special_texts: Sequence[str]) -> None:
        ordered = sorted(special_texts, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, ordered)) or NO_TEXT)
        self._heads = tuple({text[:cut] for text in ordered for cut in range(1, len(text))})
        self._tails = tuple({text[cut:] for text in ordered for cut in range(1, len(text))})

    def apply(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], str]:
        """Return copies with breaks, and the break character; the values themselves and "" when nothing needs one."""
        strings = list(_strings(values))
        if not any(map(self._needs_break, strings)):
            return values, ""
        breaker = ""
        while not breaker or any(breaker in text or _escaped(breaker) in text for text in strings):
            breaker = chr(_PRIVATE_USE_START + secrets.randbelow(_PRIVATE_USE_COUNT))
        return tuple(self._broken(value, breaker) for value in values), breaker

    def _needs_break(self, text: str) -> bool:
        return text.endswith(self._heads) or text.startswith(self._tails) or bool(self._whole.search(text))

    def _broken(self, value: Any, breaker: str) -> Any:
        if isinstance(value, str):
            head = breaker if value.startswith(self._tails) else ""
            tail = breaker if value.endswith(self._heads) else ""
            return head + self._broken_inside(value, breaker) + tail
        if isinstance(value, Mapping):
            made = {self._broken_inside(key, breaker): self._broken(item, breaker) for key, item in value.items()}
            return type(value)(made) if isinstance(value, dict) else made
        if isinstance(value, list | tuple):
            return [self._broken(item, breaker) for item in value]
        return value

    def _broken_inside(self, text: str, breaker: str) -> str:
        return self._whole.sub(lambda match: match[0][0] + breaker + match[0][1:], text)


def _escaped(breaker: str) -> str:
    """Return the break character as `tojson(ensure_ascii=True)` writes it."""
    return json.dumps(breaker)[1:-1]


def _strings(value: Any) -> Any:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
