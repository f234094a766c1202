"""Calls of the form function name, marker, arguments as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.tools.call_reader import CallReader, after_blanks
from common.tools.tool_parser import Schema, alternatives, markers_in

MAX_HEADER_CHARS = 256
_NAME = re.compile(r"\s*(?:functions\.)?([A-Za-z0-9_-]+)")


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """`opening`, then calls of the form `begin`, name, `middle`, arguments, `end`, with `between` between them;
    `closing`."""

    begin: str
    middle: str
    end: str = ""
    before_name: str = ""  # as the model is trained to write it; an answer may lack it
    after_name: str = ""
    opening: str = ""
    closing: str = ""
    between: str = ""
    channel: str = ""  # written before a forced call, which is then the only one; the reader does not see it
    answer_opening: str = ""
    silent: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return markers_in(
            self.opening, self.channel, self.begin, self.after_name, self.middle, self.end, self.closing
        )

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening, self.closing)))

    @property
    def variants(self) -> tuple[tuple[str, str], ...]:
        return ()

    @property
    def separator(self) -> str:
        return ""

    def reader(self, functions: Mapping[str, Schema], is_first: bool, begin: str) -> CallReader:
        return NamedCallReader(functions, self.middle, self.end[:1])

    def before_arguments(self, names: Iterable[str]) -> Iterable[str]:
        return [f"{self.begin}{self.before_name}{name}{self.after_name}{self.middle}{self._line}" for name in names]

    @property
    def _line(self) -> str:
        return "\n" if self.end.startswith("`") else ""

    def lark(self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]) -> list[str]:
        several = f" ({quoted(self.between)} call)*" if is_parallel and not self.channel else ""
        opening = quoted(self.channel + self.opening)
        rules = [f"calls: {opening} call{several} {quoted(self.closing)}", alternatives(schemas)]
        for index, (before, schema) in enumerate(zip(self.before_arguments(schemas), schemas.values(), strict=True)):
            rules.append(f"call_{index}: {quoted(before)} arguments_{index} {quoted(self._line + self.end)}")
            rules.append(f"arguments_{index}: {grammar.json_rule(schema)}")
        return rules

    def lark_unmarked(
        self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]
    ) -> list[str] | None:
        """Return rules of messages in channels: texts before a call or a final text; a recipient has two places."""
        if not self.channel:
            return None
        if not all(quoted(marker).startswith("<[") for marker in (*self.markers, *self.silent)):
            raise InvalidRequestError("this model's messages are not told apart by special tokens", "tools")
        channel, message, kind = quoted("<|channel|>"), quoted(self.middle), quoted("<|constrain|>")
        rules = [
            f'start: (preamble {quoted("<|end|><|start|>")} "assistant")* (call | final)',
            f'preamble: {channel} "commentary" {message} TEXT',
            f"final: {quoted(self.answer_opening)} TEXT",
            f'content: (" "? {kind} "json" | " json")? {message}',
            # The calls in it would be read from the text.
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){re.escape(self.begin)}(?s:.*)/",
            alternatives(schemas),
        ]
        for index, (name, schema) in enumerate(schemas.items()):
            recipient = json.dumps(f" {self.begin}{name}")
            rules += [
                f"call_{index}: header_{index} content arguments_{index}",
                f'header_{index}: {channel} "commentary" {recipient} | {recipient} {channel} "commentary"',
                f"arguments_{index}: {grammar.json_rule(schema)}",
            ]
        return rules


class NamedCallReader(CallReader):
    """Reads the name up to the marker after it, then one JSON value."""

    def __init__(self, names: Collection[str], middle: str, stop: str) -> None:
        super().__init__(names, stop)
        self._middle = middle
        self._header = ""
        self._state = self._read_header

    def read(self, text: str, start: int) -> int:
        position = super().read(text, start)
        if self._state == self._comma and not self.has_ended:  # the value is complete
            self._end(position)
        return position

    def _read_header(self, text: str, start: int) -> int:
        num_before = len(self._header)
        self._header += text[start:]
        place = self._header.find(self._middle, max(num_before - len(self._middle), 0))
        if not 0 <= place <= MAX_HEADER_CHARS:
            is_begun = len(self._header) <= MAX_HEADER_CHARS + len(self._middle)
            return len(text) if is_begun else self._end(start - num_before)
        position = start + place + len(self._middle) - num_before
        found = _NAME.match(self._header[:place])
        if found is None or found[1] not in self._names:
            return self._end(position)
        self.name = found[1]
        self._begin_value()
        return position

    def _value(self, text: str, start: int) -> int:
        position = after_blanks(text, start)
        if not self._stop and text[position : position + 1] == "[":  # the marker of the next call
            return self._end(position)
        return super()._value(text, position)

    def _comma(self, text: str, start: int) -> int:
        return self._end(start)


# `function` is a type, which later versions of DeepSeek omit.
DEEPSEEK_V3 = NamedCalls(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json", "```<｜tool▁call▁end｜>",
    opening="<｜tool▁calls▁begin｜>", closing="<｜tool▁calls▁end｜>", between="\n",
)  # fmt: skip
DEEPSEEK_V31 = NamedCalls(
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    opening="<｜tool▁calls▁begin｜>", closing="<｜tool▁calls▁end｜>",
)  # fmt: skip
KIMI_K2 = NamedCalls(
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.", ":0",
    opening="<|tool_calls_section_begin|>", closing="<|tool_calls_section_end|>",
)  # fmt: skip
MISTRAL_NAMED = NamedCalls("[TOOL_CALLS]", "[ARGS]")
# What `ChannelParser` keeps of a message to a function: `<|channel|>commentary to=functions.NAME ...<|message|>`.
HARMONY = NamedCalls(
    "to=functions.", "<|message|>", after_name=" <|constrain|>json", channel="<|channel|>commentary ",
    answer_opening="<|channel|>final<|message|>", silent=("<|start|>", "<|end|>"),
)  # fmt: skip
