"""Scaled rotary embeddings: frequencies equal transformers', for both spellings of configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import UnsupportedModelError
from engine.layers.rotary import rotary_frequencies
from engine.models.config import RopeConfig
from engine.models.hf_config import rope_from_hf
from engine.rope_scaling.scaling import Scaling


def test_old_and_new_spelling_mean_the_same() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    expected = RopeConfig(5e5, scaling=Scaling("linear", 2.0, original_max_position=512))
    assert rope_from_hf(old, 512) == rope_from_hf(new, 512) == expected


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        rope_from_hf({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 512)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG: dict[str, Any] = {
    "rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 32.0,
    "long_factor": [1.0 + i for i in range(64)], "short_factor": [1.0 + i / 64 for i in range(64)],
}  # fmt: skip
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    YARN,
    {**YARN, "attention_factor": 1.3},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16,
        "truncate": False,
    },
    LONG,
    {**LONG, "attention_factor": 1.3},
]


@pytest.mark.parametrize("values", ROPES)
def test_scaled_frequencies_equal_those_of_transformers(values: dict[str, Any]) -> None:
    parameters = {**values, "rope_theta": 1_000_000.0}
    theirs = transformers.LlamaConfig(head_dim=128, rope_parameters=parameters, max_position_embeddings=131072)
    expected, factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](theirs, torch.device("cpu"))
    raw = {"rope_scaling": None, "rope_parameters": parameters}
    frequencies, scale = rotary_frequencies(rope_from_hf(raw, 131072).within(4096), 128)  # where theirs begins
    torch.testing.assert_close(frequencies, expected)
    assert scale == pytest.approx(factor)


def test_long_contexts_have_factors_of_their_own() -> None:
    raw = {"rope_scaling": LONG}
    rope = rope_from_hf(raw, 131072)
    for length, name in ((4096, "short_factor"), (4097, "long_factor")):
        scaling = rope.within(length).scaling
        assert isinstance(scaling, Scaling)
        assert scaling.frequency_factors == tuple(LONG[name])
    assert rope_from_hf({**raw, "rope_scaling": {**LONG, "rope_type": "su"}}, 131072) == rope
