"""Answers in a form that clients ask for, through real processes: followed, repeatable, whole after a kill."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pydantic
import pytest

from common.grammar import grammar
from engine import LLM, SamplingParams
from tests.harness.cluster import Cluster, running_cluster

ROWS = {
    "type": "object",
    "properties": {
        "rows": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"id": {"type": "integer"}, "word": {"type": "string", "pattern": "^[a-z]{6}$"}},
                "required": ["id", "word"],
                "additionalProperties": False,
            },
            "minItems": 6,
            "maxItems": 6,
        }
    },
    "required": ["rows"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "rows", "schema": ROWS, "strict": True}}
PROMPT = "six rows with a word each " * 8


class Pet(pydantic.BaseModel):
    """What the openai package makes a schema of."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(pattern="^[A-Z][a-z]{2,7}$")
    age: int = pydantic.Field(ge=0, le=30)


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


def test_tokens_equal_those_of_one_engine(cluster: Cluster) -> None:
    """Prefill worker, hand-over and decode worker: the matcher begins anew behind the first token."""
    answer = cluster.client().completions.create(
        model="dry-run", prompt=PROMPT, max_tokens=700, temperature=1.0, seed=3,
        extra_body={"response_format": FORMAT},
    )  # fmt: skip
    params = SamplingParams(max_tokens=700, temperature=1.0, seed=3, grammar=grammar.json_schema(ROWS))
    [expected] = LLM("dry-run", num_gpu_blocks=512, num_threads=1).generate(PROMPT, params)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "stop"
    assert len(json.loads(expected.text)["rows"]) == 6


def test_the_openai_package_parses_answers(cluster: Cluster) -> None:
    answer = cluster.client().chat.completions.parse(
        model="dry-run", messages=[{"role": "user", "content": "a pet"}], response_format=Pet, seed=1, max_tokens=300
    )
    pet = answer.choices[0].message.parsed
    assert isinstance(pet, Pet)
    assert 0 <= pet.age <= 30


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"grammar": 'start: "<" /[a-z]{3}/ ">"'}, "<[a-z]{3}>"),
        ({"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}}, r"\s*\[[\strue,fals]*\]\s*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_structured_outputs(cluster: Cluster, wanted: dict[str, object], pattern: str) -> None:
    for temperature in (0.0, 1.5):
        answer = cluster.client().chat.completions.create(
            model="dry-run", messages=[{"role": "user", "content": "hello"}], max_tokens=200, temperature=temperature,
            seed=2, extra_body={"structured_outputs": wanted},
        )  # fmt: skip
        assert re.fullmatch(pattern, answer.choices[0].message.content or "")
