from __future__ import annotations

import pickle
import re
from dataclasses import replace

import msgspec
import pytest

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.speculation.settings import Method, SpeculationSettings
from tests.engine.driving import engine_config


def test_settings_of_wings_travel_with_the_cores() -> None:
    """They travel to an engine process, and to ranks."""
    config = engine_config("m", tp=2, num_speculative_tokens=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config, num_gpu_blocks=3).of(SpeculationSettings).num_speculative_tokens == 3
    with pytest.raises(ConfigError, match="--num-speculative-tokens 65: choose 1 to 64"):
        engine_config(num_speculative_tokens=65)


def resolved(**settings: object) -> SpeculationSettings:
    return SpeculationSettings(**settings).resolved()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "method", "num_tokens"),
    [
        ({}, Method.NONE, 0),
        ({"num_speculative_tokens": 3}, Method.NGRAM, 3),
        ({"speculative": "ngram"}, Method.NGRAM, 8),
        ({"speculative": "suffix"}, Method.SUFFIX, 16),
        ({"speculative": "suffix", "num_speculative_tokens": 5}, Method.SUFFIX, 5),
        ({"speculative": "draft:org/small"}, Method.DRAFT, 4),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}'}, Method.NGRAM, 5),
        ({"speculative_config": '{"method": "suffix"}'}, Method.SUFFIX, 16),
        ({"speculative_config": '{"model": "org/small", "num_speculative_tokens": 2}'}, Method.DRAFT, 2),
        ({"speculative": "eagle:org/small"}, Method.EAGLE, 4),
        ({"speculative_config": '{"method": "eagle3", "model": "org/small"}'}, Method.EAGLE, 4),
        ({"speculative": "mtp"}, Method.MTP, 3),
        ({"speculative_config": '{"method": "mtp", "num_speculative_tokens": 1}'}, Method.MTP, 1),
        ({"speculative_config": '{"method": "deepseek_mtp"}'}, Method.MTP, 3),
        (
            {
                "speculative_config": '{"method": "eagle3", "model": "org/small", "num_speculative_tokens": 2, '
                '"draft_tensor_parallel_size": 1}'
            },
            Method.EAGLE,
            2,
        ),
    ],
    ids=str,
)
def test_what_proposes_drafts(settings: dict[str, object], method: Method, num_tokens: int) -> None:
    made = resolved(**settings)
    assert (made.method, made.num_speculative_tokens) == (method, num_tokens)
    assert made.draft_model == ("org/small" if method is Method.DRAFT else "")
    assert made.eagle_head == ("org/small" if method is Method.EAGLE else "")
    assert SpeculationSettings(**settings).has_drafts == (num_tokens > 0)  # type: ignore[arg-type]


def test_vllms_names_are_understood() -> None:
    made = resolved(speculative_config='{"method": "ngram", "prompt_lookup_max": 6, "prompt_lookup_min": 3}')
    assert (made.ngram_max, made.ngram_min) == (6, 3)


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ({"speculative": "draft:x"}, "coupled"),
        ({"speculative": "draft:x", "speculative_sampling": "rejection"}, "rejection"),
        ({"speculative_config": '{"model": "x", "draft_sample_method": "probabilistic"}'}, "rejection"),
        ({"speculative_config": '{"model": "x", "draft_sample_method": "greedy"}'}, "coupled"),
        ({"speculative_config": '{"method": "mtp", "draft_sample_method": "probabilistic"}'}, "rejection"),
        ({"speculative_config": '{"model": "x", "rejection_sample_method": "standard"}'}, "coupled"),
    ],
    ids=str,
)
def test_how_drafts_are_verified(settings: dict[str, str], sampling: str) -> None:
    assert resolved(**settings).speculative_sampling == sampling


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"speculative_sampling": "rejection"}, "--speculative-sampling rejection needs drafts drawn from"),
        ({"speculative_sampling": "rejection", "speculative": "suffix"}, "choose --speculative draft:MODEL, eagle"),
        ({"speculative_config": '{"method": "ngram", "draft_sample_method": "probabilistic"}'}, "needs drafts drawn"),
        ({"speculative_config": '{"model": "x", "draft_sample_method": "gumbel"}'}, 'method "gumbel" is none'),
        ({"speculative_config": '{"model": "x", "rejection_sample_method": "block"}'}, '"block" is not served'),
        ({"speculative": "medusa:x"}, "--speculative medusa:x: choose ngram, suffix, draft:MODEL, eagle:DIR or mtp"),
        ({"speculative": "eagle:"}, "--speculative eagle:: choose"),
        ({"speculative": "mtp:x"}, "--speculative mtp:x: choose"),
        ({"speculative": "draft:"}, "--speculative draft:: choose"),
        ({"suffix_tokens": -1}, "--suffix-tokens -1"),
        ({"num_speculative_tokens": -1}, "--num-speculative-tokens -1: choose"),
        ({"num_speculative_tokens": 2, "ngram_min": 0}, "--ngram-min 0"),
        ({"num_speculative_tokens": 2, "ngram_min": 3, "ngram_max": 2}, "--ngram-min 3 --ngram-max 2"),
        ({"speculative_config": "{"}, "is not JSON"),
        ({"speculative_config": "[]"}, "give a JSON object"),
        ({"speculative_config": '{"method": "eagle", "model": "x"}'}, 'method "eagle" is none of'),
        ({"speculative_config": '{"method": "mtp", "model": "x"}'}, "leave `model` out"),
        ({"speculative_config": '{"method": "eagle3"}'}, "an EAGLE-3 head needs its `model`"),
        ({"speculative_config": '{"method": "ngram", "quantization": "fp8"}'}, "quantization is not served"),
        ({"speculative_config": '{"method": "draft_model"}'}, "needs its `model`"),
        ({"speculative_config": '{"model": "x", "draft_tensor_parallel_size": 2}'}, "draft_tensor_parallel_size is"),
        ({"speculative_config": '{"num_speculative_tokens": "5"}'}, "must be integers"),
        ({"speculative_config": '{"num_speculative_tokens": 500}'}, "choose 1 to 64"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        SpeculationSettings(**settings)  # type: ignore[arg-type]
