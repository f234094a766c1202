"""Follows JSON while it is written, to find continuations that repeat an item in an array of unique items.

No grammar can express this, since it depends on earlier items. Covers arrays of strings, numbers, booleans and null,
which `schema_rewriting` marks with UNIQUE. Works on bytes; knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

UNIQUE = "x-mini-infer-unique"  # replaces uniqueItems, which llguidance does not support
_SCALARS = frozenset({"string", "integer", "number", "boolean", "null"})
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_BOUNDS = frozenset({"pattern", "format"})  # of texts: few may remain, as between a minimum and a maximum
_QUOTE, _BACKSLASH = b'"\\'
_BLANKS_AND_MARKS = frozenset(b",:]} \t\r\n")
Nodes = tuple[Mapping[str, Any], ...]  # schemas that may apply to a value
Resolve = Callable[[Any], Any]


class Array(NamedTuple):
    nodes: Nodes
    place: int = 0
    is_unique: bool = False
    seen: frozenset[Any] = frozenset()
    texts: tuple[bytes, ...] = ()  # the only values that items may have; empty: any
    is_bounded: bool = False  # the values of items are limited, so that a repeated one may have no other continuation
    longest: int | None = None  # characters of the longest text, which cannot continue


class Object(NamedTuple):
    nodes: Nodes
    key: str | None = None  # None: a key is expected


class State(NamedTuple):
    """What has been written: the open arrays and objects, and the beginning of a text or number."""

    opened: tuple[Array | Object, ...] = ()
    piece: bytes = b""
    is_text: bool = False
    is_escaped: bool = False
    place: int = 0  # number of the JSON within the answer; negative: not in JSON
    tail: bytes = b""  # end of the text outside of JSON

    @property
    def array(self) -> Array | None:
        """The array of unique items in which an item is being written."""
        top = self.opened[-1] if self.opened else None
        return top if isinstance(top, Array) and top.is_unique else None


class UniqueItems:
    """The arrays of one schema."""

    def __init__(self, schema: Mapping[str, Any], resolve: Resolve) -> None:
        self._resolve = resolve
        self._root = tuple(_in_place(schema, resolve))
        self._children: dict[tuple[tuple[int, ...], str | int], Nodes] = {}

    def after(self, state: State, data: bytes) -> tuple[State | None, bytes | None]:
        """Return the state after `data`, or None if an item would be repeated, or could only end as a repetition.

        Also return what follows the end of the outermost array or object; None: it is still open.
        """
        opened, piece, is_text, is_escaped, place, _ = state
        for at, byte in enumerate(data):
            if is_text:
                piece += bytes((byte,))
                if is_escaped or byte != _QUOTE:
                    is_escaped = not is_escaped and byte == _BACKSLASH
                    continue
                is_text = False
            elif byte not in _BLANKS_AND_MARKS:
                if byte in b"[{":
                    opened = (*opened, self._opened(opened, byte))
                else:
                    piece += bytes((byte,))
                    is_text = byte == _QUOTE
                continue
            if piece:
                ended = _with_item(opened, piece)
                if ended is None:
                    return None, None
                opened, piece = ended, b""
            if byte in b"]}":
                opened = opened[:-1]
                if not opened:
                    return State(place=place), data[at + 1 :]
            elif byte == ord(",") and opened:
                top = opened[-1]
                top = top._replace(place=top.place + 1) if isinstance(top, Array) else top._replace(key=None)
                opened = (*opened[:-1], top)
        found = State(opened, piece, is_text, is_escaped, place)
        may_go_on = not piece or found.array is None or _may_go_on(found.array, piece, is_text)
        return found if may_go_on else None, None

    def _opened(self, opened: tuple[Array | Object, ...], byte: int) -> Array | Object:
        nodes = self._root if not opened else self._of(opened[-1])
        if byte == ord("{"):
            return Object(nodes)
        if not any(node.get(UNIQUE) for node in nodes):
            return Array(nodes)
        items = [node["items"] for node in nodes if isinstance(node.get("items"), Mapping)]
        values = next((found for each in items if (found := listed_values(each, self._resolve)) is not None), None)
        texts = tuple(json.dumps(value, ensure_ascii=False).encode() for value in values or ())
        all_nodes = [node for each in items for node in _in_place(each, self._resolve)]
        bounded = any(_BOUNDS & set(node) or {"minimum", "maximum"} <= set(node) for node in all_nodes)
        longest = min(
            (node["maxLength"] for node in all_nodes if isinstance(node.get("maxLength"), int)), default=None
        )
        return Array(nodes, 0, True, frozenset(), texts, bounded, longest)

    def _of(self, top: Array | Object) -> Nodes:
        """Return schemas that may apply to the next value in an array or object."""
        at = top.place if isinstance(top, Array) else top.key or ""
        known = (tuple(map(id, top.nodes)), at)
        if known not in self._children:
            found: dict[int, Mapping[str, Any]] = {}
            for node in top.nodes:
                for child in _children(node, at):
                    found.update({id(each): each for each in _in_place(child, self._resolve)})
            self._children[known] = tuple(found.values())
        return self._children[known]


def listed_values(items: Any, resolve: Resolve, depth: int = 0) -> list[Any] | None:
    """Return the values that a schema allows if it lists them and none is an array or object; None otherwise."""
    if not isinstance(items, Mapping) or depth > 8:
        return None
    values: Any = [items["const"]] if "const" in items else items.get("enum")
    if values is None and items.get("type") == "boolean":
        values = [False, True]
    if values is None and "$ref" in items:
        return listed_values(resolve(items["$ref"]), resolve, depth + 1)
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return None
    return values


def has_scalars(items: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Whether a schema allows neither arrays nor objects."""
    if not isinstance(items, Mapping) or depth > 8:
        return False
    types = items.get("type")
    if types is not None:
        return set([types] if isinstance(types, str) else types) <= _SCALARS
    if listed_values(items, resolve) is not None:
        return True
    if "$ref" in items:
        return has_scalars(resolve(items["$ref"]), resolve, depth + 1)
    return any(
        isinstance(items.get(key), list) and all(has_scalars(each, resolve, depth + 1) for each in items[key])
        for key in ("anyOf", "oneOf")
    )


def _in_place(schema: Any, resolve: Resolve) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas that apply to the same value."""
    reached, known = [schema], set()
    for node in reached:  # grows during the loop
        if not isinstance(node, Mapping) or id(node) in known:
            continue
        known.add(id(node))
        yield node
        for key in _IN_PLACE:
            reached += node.get(key) or ()
        if "$ref" in node:
            reached.append(resolve(node["$ref"]))


def _children(node: Mapping[str, Any], at: str | int) -> Iterator[Any]:
    """Yield schemas that may apply to an item or a property."""
    if isinstance(at, str):
        listed = node.get("properties", {})
        yield listed[at] if at in listed else node.get("additionalProperties")
        yield from node.get("patternProperties", {}).values()
        return
    first = node.get("prefixItems", node.get("items"))
    if isinstance(first, list) and at < len(first):
        yield first[at]
    else:
        yield node.get("items")
        yield node.get("additionalItems")


def _with_item(opened: tuple[Array | Object, ...], piece: bytes) -> tuple[Array | Object, ...] | None:
    """Return the open values after a text, number or word has ended; None: the item is a repetition."""
    top = opened[-1] if opened else None
    if isinstance(top, Object) and top.key is None:
        return (*opened[:-1], top._replace(key=_name(piece)))
    if isinstance(top, Array) and top.is_unique:
        value = _value(piece)
        if value in top.seen:
            return None
        return (*opened[:-1], top._replace(seen=top.seen | {value}))
    return opened


def _name(piece: bytes) -> str:
    try:
        return str(json.loads(piece))
    except ValueError:  # invalid JSON, which a grammar does not allow
        return ""


def _may_go_on(array: Array, piece: bytes, is_text: bool) -> bool:
    if array.texts:
        return any(text.startswith(piece) and _value(text) not in array.seen for text in array.texts)
    if piece[:1] in (b"t", b"f", b"n"):  # a word has only one completion
        return not any(isinstance(seen, bytes) and seen.startswith(piece) for seen in array.seen)
    if piece in (b"0", b"-0"):  # among integers, so does zero
        return Decimal(0) not in array.seen
    is_full = is_text and array.longest is not None and len(piece.decode(errors="ignore")) > array.longest
    return not (array.is_bounded or is_full) or _value(piece + b'"' if is_text else piece) not in array.seen


def _value(piece: bytes) -> Any:
    """Return the value to compare by. Each text has one spelling, without numeric escapes."""
    if piece[:1] not in b'"tfn':
        try:
            return Decimal(piece.decode())
        except ArithmeticError:  # an incomplete number
            return piece
    return piece
