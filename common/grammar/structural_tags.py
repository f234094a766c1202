"""Converts structural tags of vLLM and XGrammar to a Lark grammar: text in which marks open structured parts.

There are two forms: `{"structures": [{begin, schema, end}], "triggers": [...]}`, and `{"format": {"type": ...}}` with
nested formats. https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html describes both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequestError
from common.grammar.grammar import JSON_OPTIONS, MAX_GBNF_CHARS, gbnf, is_gbnf, json_rule, lark
from common.grammar.xml_parameters import STYLES, xml_parameters

ANY = r"/(?s:.*)/"
MAX_FORMATS = 2_000
_TOKEN_FORMATS = "token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"


def structural_tag(wanted: Mapping[str, Any]) -> str:
    """Return the grammar of a structural tag. Raises InvalidRequestError, which names the invalid place."""
    if "structures" in wanted:
        structures = _list(wanted, "structures", "")
        tags = [
            {
                "type": "tag",
                "begin": _text(each, "begin", where),
                "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
                "end": _text(each, "end", where),
            }
            for where, each in ((f"structures[{i}]", _object(each, f"structures[{i}]")) for i, each in structures)
        ]
        wanted = {"format": {"type": "triggered_tags", "triggers": wanted.get("triggers"), "tags": tags}}
    if "format" not in wanted:
        raise InvalidRequestError("a structural tag has structures and triggers, or a format")
    rules = _Rules()
    start = rules.of(wanted["format"], "format", ())
    return lark("\n".join([f"start: {start}", *rules.lines]))


class _Rules:
    """Builds Lark rules, one for each format that needs one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._num_formats = 0
        self._num_grammar_chars = 0

    def of(self, wanted: Any, where: str, ends: Sequence[str] | None) -> str:
        """Return Lark for a format with its end. ends: texts, one of which follows; none: the answer ends; None: more
        comes.

        Free text is read up to its end, so only a known end may follow it.
        """
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            raise InvalidRequestError(f"a structural tag of more than {MAX_FORMATS} formats")
        wanted = _object(wanted, where)
        kind = wanted.get("type")
        if kind in ("any_text", "triggered_tags", "dispatch") and ends is None:
            raise InvalidRequestError(f"{where}: {kind} must be the last of its tag, or of the answer")
        match kind:
            case "any_text":
                return self._free_text(wanted, where, ends or ())
            case "triggered_tags":
                return self._triggered(wanted, where, ends or ())
            case "dispatch":
                return self._dispatched(wanted, where, ends or ())
            case "sequence":
                elements = _list(wanted, "elements", where)
                last = len(elements) - 1
                said = [self.of(each, f"{where}.elements[{i}]", ends if i == last else None) for i, each in elements]
                return " ".join(said)
            case "or":
                said = [self.of(each, f"{where}.elements[{i}]", ends) for i, each in _list(wanted, "elements", where)]
                return f"({' | '.join(said)})"
        return " ".join([self._bounded(wanted, where), *([_one_of(ends)] if ends else [])])

    def _bounded(self, wanted: Mapping[str, Any], where: str) -> str:
        """Return Lark for a format that determines its own end."""
        match wanted.get("type"):
            case "const_string":
                return json.dumps(_text(wanted, "value", where))
            case "json_schema":
                return self._json(wanted, where, wanted.get("style", "json"))
            case "qwen_xml_parameter":  # XGrammar's older name
                return self._json(wanted, where, "qwen_xml")
            case "grammar":
                return self._grammar(_text(wanted, "grammar", where), where)
            case "regex":
                return self._rule("PATTERN", f"/{_slashed(_text(wanted, 'pattern', where))}/")
            case ("optional" | "plus" | "star") as kind:
                inner = self.of(wanted.get("content"), f"{where}.content", None)
                return f"({inner})" + {"optional": "?", "plus": "+", "star": "*"}[kind]
            case "repeat":
                least, most = (_count(wanted, key, where) for key in ("min", "max"))
                inner = self.of(wanted.get("content"), f"{where}.content", None)
                return f"({inner}){{{least},{'' if most < 0 else most}}}"
            case "tag":
                return " ".join(self._tag(wanted, where))
            case "tags_with_separator":
                return self._separated(wanted, where)
            case kind if kind in _TOKEN_FORMATS:
                raise InvalidRequestError(f"{where}: {kind} is not supported: no format of single tokens is")
        raise InvalidRequestError(f"{where}: {str(wanted.get('type'))[:50]!r} is not supported as a format")

    def _rule(self, name: str, body: str, options: str = "") -> str:
        name = f"{name}_{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def _json(self, wanted: Mapping[str, Any], where: str, style: Any) -> str:
        if wanted.get("any_order"):
            raise InvalidRequestError(f"{where}: any_order is not supported")
        schema = wanted.get("json_schema")
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        place = f"{where}.json_schema"
        if style == "json":
            return self._rule("json", json_rule(_object(schema, place), JSON_OPTIONS))
        if style not in STYLES:
            known = ", ".join(STYLES)
            raise InvalidRequestError(f"{where}: style {str(style)[:50]!r} is not supported; json, {known} are")
        return f"({xml_parameters(_object(schema, place), style, place, self._rule)})"

    def _grammar(self, text: str, where: str) -> str:
        """Return the rule of a nested grammar, whose rules may have any names."""
        self._num_grammar_chars += len(text)
        if self._num_grammar_chars > MAX_GBNF_CHARS:
            raise InvalidRequestError(f"{where}: grammars of more than {MAX_GBNF_CHARS} characters")
        if "%llguidance" in text:
            raise InvalidRequestError(f"{where}: %llguidance stands in no grammar within a structural tag")
        try:
            inner = gbnf(text) if is_gbnf(text) else lark(text)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}: {error}") from None
        return self._rule("grammar", f"%lark {{\n{inner.removeprefix('lark:')}\n}}")

    def _free_text(self, wanted: Mapping[str, Any], where: str, ends: Sequence[str]) -> str:
        if wanted.get("max_tokens") is not None:
            raise InvalidRequestError(f"{where}: max_tokens is not supported; max_chars is")
        most = None if wanted.get("max_chars") is None else _count(wanted, "max_chars", where)
        bound = "" if most is None else f"/(?s:.{{0,{max(most, 0)}}})/ & "
        free = f"{bound}{_without([*_excludes(wanted, where), *ends])}"
        return self._text(self._rule("TEXT", free), ends)

    def _text(self, free: str, ends: Sequence[str]) -> str:
        """Return the rule of free text up to the first of its ends."""
        return self._rule("text", f"{free} {_one_of(ends)}", "[lazy]") if ends else free

    def _tag(self, wanted: Any, where: str) -> tuple[str, str]:
        """Return the begin of a tag, and its content with the end."""
        wanted = _object(wanted, where)
        if wanted.get("type", "tag") != "tag":
            raise InvalidRequestError(f"{where}: must be a tag")
        end = wanted.get("end")
        ends = [_string(each, f"{where}.end") for each in (end if isinstance(end, list) else [end])]
        said = [each for each in ends if each]
        if len(said) < len(ends):  # its end may be empty
            said = []
        content = self.of(wanted.get("content"), f"{where}.content", said or None)
        return json.dumps(_text(wanted, "begin", where)), content

    def _triggered(self, wanted: Mapping[str, Any], where: str, ends: Sequence[str]) -> str:
        triggers = [_string(each, f"{where}.triggers[{i}]") for i, each in _list(wanted, "triggers", where)]
        if not all(triggers):
            raise InvalidRequestError(f"{where}.triggers: a trigger must not be empty")
        tags: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in _list(wanted, "tags", where):
            begin, content = self._tag(tag, f"{where}.tags[{index}]")
            begun = json.loads(begin)
            trigger = next((each for each in triggers if begun.startswith(each)), None)
            if trigger is None:
                raise InvalidRequestError(f"{where}.tags[{index}]: begins with none of the triggers")
            tags[trigger].append(f"{json.dumps(begun[len(trigger) :])} {content}")
        is_once, is_needed = bool(wanted.get("stop_after_first")), bool(wanted.get("at_least_one"))
        return self._after_triggers(tags, _excludes(wanted, where), ends, is_once, is_needed)

    def _dispatched(self, wanted: Mapping[str, Any], where: str, ends: Sequence[str]) -> str:
        contents: dict[str, list[str]] = {}
        for index, rule in _list(wanted, "rules", where):
            place = f"{where}.rules[{index}]"
            if not isinstance(rule, list | tuple) or len(rule) != 2 or not _string(rule[0], place):
                raise InvalidRequestError(f"{place}: must be a text and the format that follows it")
            contents.setdefault(rule[0], []).append(self.of(rule[1], f"{place}[1]", None))
        return self._after_triggers(contents, _excludes(wanted, where), ends, wanted.get("loop") is False, False)

    def _after_triggers(
        self, contents: Mapping[str, list[str]], excludes: Sequence[str], ends: Sequence[str], is_once: bool,
        is_needed: bool,
    ) -> str:  # fmt: skip
        """Return free text in which each trigger opens one of its contents. is_once: the text ends after one."""
        free = self._rule("TEXT", _without([*contents, *excludes, *ends]))
        options = []
        for trigger, bodies in contents.items():
            if bodies:
                mark = self._rule("trigger", f"{free} {json.dumps(trigger)}", "[lazy]")
                options.append(f"{mark} ({' | '.join(bodies)})")
        found, last = f"({' | '.join(options)})", self._text(free, ends)
        if is_once:
            after = f"{found} {_one_of(ends)}" if ends else found
            return f"({after})" if is_needed else f"({after} | {last})"
        return f"{found}{'+' if is_needed else '*'} {last}"

    def _separated(self, wanted: Mapping[str, Any], where: str) -> str:
        tags = [" ".join(self._tag(tag, f"{where}.tags[{i}]")) for i, tag in _list(wanted, "tags", where)]
        one = self._rule("tags", " | ".join(tags))
        separator = json.dumps(_text(wanted, "separator", where))
        said = one if wanted.get("stop_after_first") else f"{one} ({separator} {one})*"
        return said if wanted.get("at_least_one") else f"({said})?"


def _excludes(wanted: Mapping[str, Any], where: str) -> list[str]:
    return [_string(each, f"{where}.excludes[{i}]") for i, each in _list(wanted, "excludes", where, ())]


def _one_of(ends: Sequence[str]) -> str:
    return f"({' | '.join(map(json.dumps, ends))})"


def _without(texts: Sequence[str]) -> str:
    """Return a terminal of texts that contain none of these."""
    found = "|".join(re.escape(text) for text in texts)
    return f"{ANY} & ~/(?s:.*)({_slashed(found)})(?s:.*)/" if texts else ANY


def _slashed(pattern: str) -> str:
    """Escape a pattern for use between slashes."""
    return re.sub(r"(\\.)|/", lambda found: found.group(1) or r"\/", pattern).replace("\n", r"\n")


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where}: must be an object")
    return value


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}: must be a string")
    return value


def _text(wanted: Mapping[str, Any], key: str, where: str) -> str:
    return _string(wanted.get(key), f"{where}.{key}")


def _count(wanted: Mapping[str, Any], key: str, where: str) -> int:
    value = wanted.get(key)
    if not isinstance(value, int) or not -1 <= value <= 10_000:
        raise InvalidRequestError(f"{where}.{key}: must be a number up to 10,000")
    return value


def _list(wanted: Mapping[str, Any], key: str, where: str, default: Any = None) -> list[tuple[int, Any]]:
    value = wanted.get(key, default)
    if not isinstance(value, list | tuple) or (not value and default is None):
        raise InvalidRequestError(f"{f'{where}.' if where else ''}{key}: must be a list of at least one")
    return list(enumerate(value))
