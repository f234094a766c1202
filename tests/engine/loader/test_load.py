"""Fingerprints, and the dry-run model."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.model_files import ModelFiles, resolve_model
from engine.loader.fingerprint import fingerprint
from tests.engine.driving import Driver, directory, make_runner, open_model
from tests.engine.tiny_models import TINY_MODELS

DRY_RUN = ModelFiles("dry-run", "dry-run", Path())


def test_equal_files_have_equal_fingerprints_and_others_not(tmp_path: Path) -> None:
    first = TINY_MODELS["llama"].save(tmp_path / "first")
    shutil.copytree(first, tmp_path / "second")
    loaded, _ = open_model(directory(first))
    assert open_model(directory(tmp_path / "second"))[0].fingerprint == loaded.fingerprint
    others = {
        loaded.fingerprint,
        open_model(directory(first), dtype="float32")[0].fingerprint,
        open_model(directory(first), load_format="dummy")[0].fingerprint,
    }
    weights = tmp_path / "second" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    others.add(open_model(directory(tmp_path / "second"))[0].fingerprint)
    assert len(others) == 4


@pytest.mark.wing("common.gguf")
def test_the_fingerprint_of_a_real_file_is_cheap() -> None:
    path = resolve_model("").path
    began = time.process_time()
    fingerprint({}, [path])
    assert time.process_time() - began < 0.3


def test_dry_run_output_is_lively_and_repeatable() -> None:
    loaded, config = open_model(DRY_RUN)
    assert (loaded.dtype, loaded.quant_mode) == (torch.float32, "none")
    prompts = [list(b"Hello"), list(b"What is the capital of France?"), [256, *b"abc"]]
    outputs = []
    for _ in range(2):
        driver = Driver(make_runner(loaded, config), config)
        requests = [driver.add(prompt) for prompt in prompts]
        driver.finish(requests, 60, chunk=16)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]
    for tokens in outputs[0]:
        assert len(set(tokens)) > 20


def test_dry_run_weights_are_the_same_in_every_type() -> None:
    """Workers on different devices may exchange KV when their fingerprints are equal, so their weights must be."""
    exact: Any = open_model(DRY_RUN)[0].model
    rounded: Any = open_model(DRY_RUN, dtype="bfloat16", quant_mode="none")[0].model
    last, rounded_last = exact.blocks[-1], rounded.blocks[-1]
    assert torch.equal(last.down.weight.bfloat16(), rounded_last.down.weight)


def test_a_missing_gpu_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(ConfigError, match="no CUDA device"):
        open_model(DRY_RUN, device="cuda")
