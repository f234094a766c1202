"""Typical pydantic models: every answer that follows their schemas is parsed by them."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import uuid
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import jsonschema
import pydantic
import pytest
from annotated_types import Len

from router.grammar.answer_format import ResponseFormat, answer_grammar
from tests.common.grammar.following import random_text

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Files(pydantic.BaseModel):
    path: Path
    password: pydantic.SecretStr
    data: bytes
    key: Annotated[bytes, Len(2, 4)]


class Sets(pydantic.BaseModel):
    colors: set[Color]
    levels: frozenset[Level]
    flags: set[bool] = pydantic.Field(min_length=1)
    letters: set[Literal["a", "b", "c", "d", "e", "f", "g", "h"]] = pydantic.Field(min_length=5)
    ids: set[int] = pydantic.Field(min_length=3, max_length=5)
    words: frozenset[str]
    paths: set[Path] = set()


class Numbers(pydantic.BaseModel):
    ratio: Annotated[float, pydantic.Field(gt=0, lt=1)]
    even: Annotated[int, pydantic.Field(multiple_of=2, ge=-10, le=10)]
    count: pydantic.PositiveInt


class Price(pydantic.BaseModel):
    """A model whose schema says only that a price is a number or a string."""

    price: decimal.Decimal
    least: Annotated[decimal.Decimal, pydantic.Field(ge=0, le=100)]


class Times(pydantic.BaseModel):
    at: datetime.datetime
    on: datetime.date
    clock: datetime.time
    took: datetime.timedelta
    id: uuid.UUID
    version: pydantic.UUID4


class Words(pydantic.BaseModel):
    code: Annotated[str, pydantic.StringConstraints(pattern="^[A-Z]{2}-[0-9]+$", max_length=8)]
    names: dict[Color, int]
    maybe: Color | None = None
    pair: tuple[int, Literal["l", "r"]] = (0, "l")
    link: pydantic.AnyUrl
    mail: Annotated[str, pydantic.Field(json_schema_extra={"format": "email"})]


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tricks: list[str] = pydantic.Field(max_length=2)


class Owner(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    pets: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]] = pydantic.Field(default=[], max_length=2)
    either: int | str | None


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T] = pydantic.Field(min_length=1, max_length=2)
    next: int | None = None


class Tree(pydantic.BaseModel):
    value: int
    children: list[Tree] = pydantic.Field(default=[], max_length=2)


MODELS: list[type[pydantic.BaseModel]] = [Files, Sets, Numbers, Times, Words, Owner, Page[Cat], Page[Page[int]], Tree]


async def grammar_of(wanted: dict[str, Any]) -> str:
    asked = ResponseFormat.model_validate({"type": "json_schema", "json_schema": wanted})
    return await answer_grammar(asked, None, 1)


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
async def test_answers_are_read_by_the_model(model: type[pydantic.BaseModel], strict: bool | None) -> None:
    wanted = {"name": "answer", "schema": model.model_json_schema(), "strict": strict}
    grammar = await grammar_of(wanted)
    for seed in range(6):
        text = random_text(grammar, seed)
        read = model.model_validate_json(text)
        for name, value in read:  # no item is there twice
            if isinstance(value, set | frozenset) and name in json.loads(text):
                assert len(value) == len(json.loads(text)[name])
        assert isinstance(json.loads(text), dict)


async def test_decimals_are_numbers_or_texts() -> None:
    schema = Price.model_json_schema()
    grammar = await grammar_of({"name": "answer", "schema": schema})
    numbers = 0
    for seed in range(20):
        answer = json.loads(random_text(grammar, seed))
        jsonschema.validate(answer, schema)
        if not any(isinstance(value, str) for value in answer.values()):
            assert Price.model_validate(answer)
            numbers += 1
    assert numbers
