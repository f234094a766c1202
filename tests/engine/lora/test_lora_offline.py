"""Adapters by their folder in the Python API."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import InvalidRequestError
from engine import LLM, AsyncLLM, SamplingParams
from engine.loader.random_weights import DRY_RUN_CONFIG
from tests.harness.adapters import shapes_of_config, write_adapter

pytestmark = [pytest.mark.wing("engine.lora"), pytest.mark.wing("engine.offline")]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


async def test_folders_name_adapters(tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "poet", shapes_of_config(DRY_RUN_CONFIG), std=0.3))
    llm = LLM("dry-run", num_gpu_blocks=64, num_threads=1, enable_lora=True)
    [plain], [poet] = llm.generate("hello", PARAMS), llm.generate("hello", PARAMS, adapter=folder)
    assert plain.token_ids != poet.token_ids
    assert "".join(llm.stream("hello", PARAMS, adapter=folder)) == poet.text
    assert llm.chat([{"role": "user", "content": "x"}], PARAMS, adapter=folder).token_ids
    with pytest.raises(InvalidRequestError, match=r"has no adapter_config\.json"):
        llm.generate("hello", PARAMS, adapter=str(tmp_path))
    async with AsyncLLM("dry-run", num_gpu_blocks=64, num_threads=1, enable_lora=True) as other:
        assert (await other.generate("hello", PARAMS, adapter=folder))[0].token_ids == poet.token_ids
        pieces = [piece async for piece in other.stream("hello", PARAMS, adapter=folder)]
        assert "".join(pieces) == poet.text
