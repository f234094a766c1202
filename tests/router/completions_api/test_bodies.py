"""Invalid requests to /v1/completions get a 4xx, as in tests/router/api/test_schemas.py."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from common.token_ids import unpack_ids
from tests.common.text.wrapping_tokenizer import BOS, EOS, wrapping_tokenizer
from tests.harness.router import Cluster, cluster
from tests.router.api.test_schemas import RAW_BODIES, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMPLETIONS = "/v1/completions"

_PROMPT_CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [320]}, "prompt"),
    ({"prompt": [1 << 40]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
    ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": -1}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": ["x"] * 100, "n": 2}, "n"),
    ({"prompt": "x", "best_of": 10**9}, "best_of"),
    ({"prompt": ["x", ""]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [5] * 512}, "prompt"),
    ({"prompt": [5] * 513}, "prompt"),
    ({"prompt": "a" * 10_000_000}, "prompt"),
]


@pytest.mark.parametrize("case", range(len(_PROMPT_CASES)))
async def test_prompts(c: Cluster, case: int) -> None:
    fields, param = _PROMPT_CASES[case]
    error = await refused(c, COMPLETIONS, orjson.dumps(fields))
    assert (error["param"] or "").split(".")[0] == param, error


@pytest.mark.parametrize("name", ["empty", "not json", "nan", "lone surrogate", "deep nesting"])
async def test_bodies(c: Cluster, name: str) -> None:
    error = await refused(c, COMPLETIONS, RAW_BODIES[name])
    assert error["status"] == 400


async def test_context_length(c: Cluster) -> None:
    error = await refused(c, COMPLETIONS, orjson.dumps({"prompt": [5] * 600}))
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 512 tokens. However, your prompt resulted"
    )
    error = await refused(c, COMPLETIONS, orjson.dumps({"prompt": [5] * 500, "max_tokens": 20}))
    assert error["message"] == (
        "This model's maximum context length is 512 tokens. However, you requested 520 tokens (500 in the prompt, "
        "20 in the completion). Please reduce the length of the prompt or completion: max_tokens must be at most 12, "
        "not 20."
    )
    assert (await c.complete([5] * 511, max_tokens=1)).status_code == 200
    assert (await c.complete([5] * 511, max_tokens=None)).json()["usage"]["completion_tokens"] == 1
    [submit] = [c.decode[0].submits[-1]]
    assert submit.sampling.max_tokens == 1


async def test_a_rule_is_named(c: Cluster) -> None:
    error = await refused(c, COMPLETIONS, orjson.dumps({"prompt": [1, "a"]}))
    assert "a list of token ids" in error["message"]
    await c.complete(max_tokens=None)
    assert c.decode[0].submits[-1].sampling.max_tokens == 16


async def test_odd_text_is_text(c: Cluster) -> None:
    for text in ("\0", "a\0b", "\ufeff", "\U0010ffff", "\u202e", "a" * 400, "<eos><user>"):
        answer = await c.complete(text, echo=True, max_tokens=1)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"].startswith(text)


async def test_prompts_with_and_without_special_tokens() -> None:
    async with cluster(tokenizer=wrapping_tokenizer()) as c:
        for fields, wanted in (({}, [BOS, 97, EOS]), ({"add_special_tokens": False}, [97])):
            assert (await c.complete("a", **fields)).status_code == 200
            assert unpack_ids(c.decode[0].submits[-1].prompt_token_ids) == wanted
