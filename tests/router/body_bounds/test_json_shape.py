"""Counts of the elements of a JSON text, without parsing it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from router.body_bounds import json_shape
from router.body_bounds.json_shape import Shape, shape_of
from router.http.body import parse_json_object

TEXTS = st.text(st.sampled_from('a":[{,\\\n\u00e9'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXTS,  # larger integers are floats to orjson
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def counted(value: Any) -> Shape:
    """Return the same counts by walking the parsed value."""
    if isinstance(value, str):
        return Shape(1, 0, 0)
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return Shape(0, 0, 0)
    num_keys = len(value) if isinstance(value, dict) else 0
    shapes = [counted(child) for child in inner]
    return Shape(
        num_keys + sum(s.num_strings for s in shapes),
        1 + sum(s.num_containers for s in shapes),
        num_keys + sum(s.num_keys for s in shapes),
    )


@given(VALUES, st.booleans())
def test_counts_are_those_of_the_parsed_value(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert shape_of(text, 1000) == counted(value)


def test_more_strings_than_allowed_are_not_counted() -> None:
    assert shape_of(b'["a","b"]', 2) == Shape(2, 1, 0)
    assert shape_of(b'["a","b"]', 1) is None


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_keys_that_are_there_once_are_accepted(value: dict[str, Any]) -> None:
    assert parse_json_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "text", [b'{"a":1,"a":1}', b'{"x":[[{"a:":[]}],{"b":1,"b":[1]}]}', b'{"x":{"\\\\":1,"\\\\":2}}']
)
def test_keys_that_are_there_twice_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="duplicate keys"):
        parse_json_object(text)


@pytest.mark.parametrize("values", [b'"a"', b"[]", b"{}"])
def test_what_would_take_much_more_memory_than_its_text_is_refused(
    values: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_shape, "MAX_VALUES", 100)
    few, many = (b'{"x":[' + b",".join([values] * count) + b"]}" for count in (90, 110))
    assert len(parse_json_object(few)["x"]) == 90
    with pytest.raises(InvalidRequestError, match="more than 100 strings"):
        parse_json_object(many)
