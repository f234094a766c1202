"""`LLM.embed` and `AsyncLLM.embed`: the vectors equal transformers'."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from common.errors import ContextLengthError, InvalidRequestError
from mini_infer import LLM, AsyncLLM, Embedding, SamplingParams
from tests.engine.pooling.test_vectors import prompts_of
from tests.engine.tiny_models import SHAPE, TinyModel
from tests.harness.cluster import save_with_tokenizer

pytestmark = pytest.mark.wing("engine.pooling")
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks": 64, "num_threads": 1}
TINY = TinyModel("Llama", {**SHAPE, "vocab_size": 260})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_with_tokenizer(TINY, tmp_path_factory.mktemp("model"))
    modules = [{"path": "", "type": "models.Transformer"}, {"path": "1_Pooling", "type": "models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return str(folder)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, **SETTINGS)


@torch.inference_mode()
def wanted(prompts: list[list[int]], pooling: str = "mean", dimensions: int | None = None) -> list[Tensor]:
    states = [TINY.build().model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    pooled = [each.mean(dim=0) if pooling == "mean" else each[-1] for each in states]
    return [normalize(each[:dimensions], dim=0) for each in pooled]


def check(found: list[Embedding], vectors: list[Tensor]) -> None:
    for ours, theirs in zip(found, vectors, strict=True):
        torch.testing.assert_close(torch.tensor(ours.vector), theirs, rtol=1e-4, atol=1e-4)


def test_vectors_in_order_of_their_prompts(llm: LLM) -> None:
    prompts = prompts_of()
    found = llm.embed(prompts)
    assert [each.prompt_token_ids for each in found] == prompts
    check(found, wanted(prompts))
    check(llm.embed(prompts, "last"), wanted(prompts, "last"))
    check(llm.embed(prompts, dimensions=5), wanted(prompts, dimensions=5))
    assert llm.embed([]) == []


def test_texts_and_vectors_as_they_are(llm: LLM) -> None:
    [found] = llm.embed("Hello", normalize=False)
    assert found.prompt_token_ids == llm.tokenizer.encode("Hello", add_special_tokens=True)
    length = math.hypot(*found.vector)
    assert length != pytest.approx(1.0)
    check([Embedding([], [value / length for value in found.vector])], wanted([found.prompt_token_ids]))


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"pooling": "max"}, "pooling"), ({"pooling": ""}, "pooling"), ({"dimensions": 0}, "dimensions"),
     ({"dimensions": 49}, "dimensions")],
)  # fmt: skip
def test_what_cannot_work_is_refused(fields: dict[str, Any], param: str, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.embed(["a", "b"], **fields)
    assert caught.value.param == param
    with pytest.raises(ContextLengthError):
        llm.embed([[1], [5] * 256])
    check(llm.embed([[1, 2]]), wanted([[1, 2]]))
    assert llm.engine.load().num_requests == 0


async def test_beside_tasks_that_generate(model: str) -> None:
    prompts = prompts_of()
    async with AsyncLLM(model, **SETTINGS) as shared:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        answering = asyncio.create_task(shared.generate("Hello", params))
        found = await asyncio.gather(*(shared.embed([prompt]) for prompt in prompts))
        assert len((await answering)[0].token_ids) == 20
        check([vector for [vector] in found], wanted(prompts))
        assert shared.engine.load().num_requests == 0
