"""An answer in a form that a client asks for, through real processes."""

from __future__ import annotations

import json

from common.grammar import grammar
from engine import LLM, SamplingParams
from tests.harness.cluster import running_cluster

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


def test_tokens_equal_those_of_one_engine() -> None:
    """Prefill worker, hand-over and decode worker: the matcher begins anew behind the first token."""
    with running_cluster() as cluster, cluster.client() as client:
        answer = client.completions.create(
            model="dry-run", prompt=PROMPT, max_tokens=700, temperature=1.0, seed=3,
            extra_body={"response_format": FORMAT},
        )  # fmt: skip
    params = SamplingParams(max_tokens=700, temperature=1.0, seed=3, grammar=grammar.json_schema(ROWS))
    [expected] = LLM("dry-run", num_gpu_blocks=512, num_threads=1).generate(PROMPT, params)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "stop"
    assert len(json.loads(expected.text)["rows"]) == 6
