"""Adapters together with other features, over all kinds of models: the tokens of an engine without these features."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.lora.adapter_ref import AdapterRef
from engine.assembly import EngineParts
from engine.loader.random_weights import DRY_RUN_CONFIG
from engine.models.config import ModelConfig
from mini_infer import LLM, AsyncLLM
from tests.engine.combinations import FLOAT32, MODELS, PLAIN, PROMPTS, SWAP, open_engine, run
from tests.engine.speculation.eagle.heads import RandomHead
from tests.engine.speculation.opening import rows_with_drafts
from tests.engine.tiny_models import TINY_MODELS
from tests.harness.adapters import shapes_of_config, write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.wing("engine.lora"), pytest.mark.usefixtures("byte_tokens")]


def write_for(folder: Path, config: ModelConfig) -> str:
    """Write an adapter of every layer that the model's adapters may change, except the output projection."""
    return str(AdapterRef.of(write_adapter(folder, shapes_of_config(config), ("_proj",), std=0.25)))


def with_adapter(parts: EngineParts, name: str) -> EngineParts:
    """Make every request of the engine name the adapter."""
    parts.engine.add_request = partial(parts.engine.add_request, adapter=name)  # type: ignore[method-assign]
    return parts


@pytest.mark.parametrize("name", MODELS)
def test_with_drafts_swapped_blocks_and_a_prompt_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, settings, num_blocks = MODELS[name]
    path, lora = save(tmp_path / "m"), {**settings, "enable_lora": True}
    plain = open_engine(path, **settings)
    adapter = write_for(tmp_path / "adapter", plain.loaded.config)
    expected = run(with_adapter(open_engine(path, **lora), adapter))
    assert expected.tokens[1:4] != run(plain).tokens[1:4]
    expected.draft(monkeypatch)
    made = open_engine(
        path, **lora, **SWAP, num_speculative_tokens=3, adaptive_drafts=False, itl_objective_ms=1000.0,
        num_gpu_blocks=2 * num_blocks,
    )  # fmt: skip
    expected.check(with_adapter(made, adapter), near=5e-2, is_swapped=True)


def test_rows_of_adapters_and_of_the_model_itself_with_an_eagle_head(tmp_path: Path) -> None:
    """The head reads a row's hidden states with its adapter applied."""
    settings: dict[str, Any] = {**FLOAT32, "enable_lora": True}
    path = TINY_MODELS["llama"].save(tmp_path / "m")
    plain = open_engine(path, **settings)
    head = RandomHead({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}).save(tmp_path / "head")
    made = open_engine(path, **settings, speculative=f"eagle:{head}", num_speculative_tokens=3, adaptive_drafts=False)
    name = write_for(tmp_path / "adapter", plain.loaded.config)
    found = []
    for parts in (plain, made):
        requests = [parts.engine.add_request(p, PLAIN, adapter=each) for each in ("", name) for p in PROMPTS]
        drafted = {row.request_id for row in rows_with_drafts(parts.engine)}
        found.append([request.output_token_ids for request in requests])
    assert found[0] == found[1]
    assert found[0][:4] != found[0][4:]
    assert drafted == {request.request_id for request in requests}


@pytest.mark.wing("engine.offline")
async def test_folders_name_adapters(tmp_path: Path) -> None:
    """In the Python API, adapters are given as folders."""
    params = replace(PLAIN, prompt_logprobs=None)
    folder = str(write_adapter(tmp_path / "poet", shapes_of_config(DRY_RUN_CONFIG), std=0.3))
    llm = LLM("dry-run", num_gpu_blocks=64, num_threads=1, enable_lora=True)
    [plain], [poet] = llm.generate("hello", params), llm.generate("hello", params, adapter=folder)
    assert plain.token_ids != poet.token_ids
    assert "".join(llm.stream("hello", params, adapter=folder)) == poet.text
    assert llm.chat([{"role": "user", "content": "x"}], params, adapter=folder).token_ids
    with pytest.raises(InvalidRequestError, match=r"has no adapter_config\.json"):
        llm.generate("hello", params, adapter=str(tmp_path))
    async with AsyncLLM("dry-run", num_gpu_blocks=64, num_threads=1, enable_lora=True) as other:
        assert (await other.generate("hello", params, adapter=folder))[0].token_ids == poet.token_ids
        pieces = [piece async for piece in other.stream("hello", params, adapter=folder)]
        assert "".join(pieces) == poet.text
