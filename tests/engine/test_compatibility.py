"""docs/compatibility.md agrees with the rules between settings and with the tests that it names."""

from __future__ import annotations

import ast
from dataclasses import fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from engine.config import EngineConfig
from tests.compatibility import (
    DEVICES,
    FLAGS,
    KEYS,
    NAMES,
    SETTINGS,
    TESTS,
    needs,
    notes,
    page,
    refusal,
    rules,
    run_together,
    untested,
)
from tests.wings import files, removable

ROOT = Path(__file__).parents[2]
# The settings of all wings are needed, of which the mark names one: without it the core's tests run alone.
pytestmark = [
    pytest.mark.wing("engine.speculation"),
    pytest.mark.skipif(
        not KEYS.keys() <= {field.name for field in fields(EngineConfig)}, reason="needs the settings of all wings"
    ),
]
# Pairs that nothing refuses and no test runs together. The number may fall; a new feature may add its own pairs.
NUM_UNTESTED = 0
ON: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "remote": {"pp": 2, "stage_address": "host:1"},
    "expert": {"expert_parallel": True},
    "dispatch": {"expert_exchange": "dispatch"},
    "counts": {"expert_load_file": "loads.json"},
    "placement": {"expert_placement": "loads.json"},
    "rebalancing": {"expert_rebalance_interval": 100},
    "replicas": {"num_redundant_experts": 2},
    "drafts": {"num_speculative_tokens": 3},
    "rejection": {"speculative": "draft:x", "speculative_sampling": "rejection"},
    "objectives": {"itl_objective_ms": 20.0},
    "quantized": {"quant_mode": "int8-weight"},
    "kv8": {"kv_cache_dtype": "fp8"},
    "swap": {"preemption": "swap"},
    "tier": {"host_tier_gb": 1.0},
    "simulation": {"simulated_steps": "base=0.01"},
    "foreign": {"model_impl": "transformers"},
    "lora": {"enable_lora": True},
    "gpu": {"device": "cuda"},
}
EXCLUDED = [(one, other, reason) for one, others, reason in rules("excludes") for other in others]


def config_of(*keys: str) -> EngineConfig:
    """Make settings with these features on. Raises ConfigError if they cannot be combined."""
    return EngineConfig(**dict(chain.from_iterable(ON[key].items() for key in keys)))


def with_needs(*keys: str) -> list[str]:
    """Return the features and the first choice of each feature that they need."""
    found, left = list[str](), list(keys)
    while left:
        if (key := left.pop()) in SETTINGS and key not in found:
            found.append(key)
            left += [options[0] for options in needs(key)]
    return found


def test_the_page_is_what_its_sources_say() -> None:
    written = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert written == page(), "run `python -m tests.compatibility > docs/compatibility.md`"


def test_every_feature_has_settings_here() -> None:
    assert ON.keys() == FLAGS.keys()
    names = {field.name for field in fields(EngineConfig)}
    assert KEYS.keys() <= names
    assert all(settings.keys() <= names for settings in ON.values())


@pytest.mark.parametrize(("one", "other", "reason"), EXCLUDED)
def test_pairs_are_refused_with_their_reason(one: str, other: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(one, other)
    assert str(refused.value) == reason


@pytest.mark.parametrize(("feature", "needed", "reason"), rules("needs"))
def test_features_without_what_they_need_are_refused(feature: str, needed: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(feature)
    assert str(refused.value) == reason
    for each in needed:
        config_of(feature, each, *with_needs(each))


@pytest.mark.parametrize("key", SETTINGS)
def test_other_pairs_of_settings_are_not_refused(key: str) -> None:
    """What they need does not refuse them either; a setting that the page refuses is refused."""
    for other in SETTINGS:
        if other == key:
            continue
        if refusal(key, other):
            with pytest.raises(ConfigError):
                config_of(*with_needs(key, other))
        else:
            config_of(*with_needs(key, other))


def test_no_pair_is_both_refused_and_tested() -> None:
    pairs = [tuple(pair) for pair in run_together() if not pair & DEVICES.keys()]
    assert [pair for pair in pairs if refusal(*pair)] == []
    assert [sorted(pair) for pair in run_together() if pair & DEVICES.keys() and refusal(*pair)] == []


def test_limits_and_needs_are_of_pairs_that_are_tested() -> None:
    cells = [cell for note in notes() if note.kind in ("limit", "need") for cell in note.cells]
    assert [cell for cell in cells if frozenset(cell) not in run_together()] == []


def test_pairs_without_a_test_become_fewer() -> None:
    assert len(untested()) == NUM_UNTESTED, untested()


def test_names_are_known() -> None:
    runs = [features for each in TESTS.values() for features in each]
    assert set(chain.from_iterable(runs)) == NAMES.keys()
    assert [features for features in runs if len(set(features)) < len(features)] == []
    assert {key for note in notes() for cell in note.cells for key in cell} <= NAMES.keys() | DEVICES.keys()


@cache
def functions(path: str) -> set[str]:
    """Return the names of a file's tests."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.skipif(not {*removable()} <= {*files().values()}, reason="a copy of the core has no tests of wings")
def test_what_is_named_exists() -> None:
    for test in [*TESTS, *(note.test for note in notes() if note.test)]:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert name.startswith("test_"), test
        assert name in functions(path), test
    for note in notes():
        if note.kind != "never" and note.file:
            assert note.test, note
            assert note.says in (ROOT / note.file).read_text(encoding="utf-8"), note
