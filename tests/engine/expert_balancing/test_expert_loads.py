"""Files of expert loads: which tokens are counted, and which files are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from engine.dummy_weights.weights import DummyWeights
from engine.expert_balancing.loads import NUM_READS, ExpertLoadRecorder, placements_of
from engine.expert_balancing.rebalancing import Rebalancer
from engine.models.config import ModelConfig, RopeConfig
from engine.moe.config import MoeConfig
from engine.moe.layers import of_layer
from engine.moe.moe import Moe
from engine.plan import PlacedExperts
from mini_infer import LLM

CONFIG = ModelConfig(
    architecture="Qwen3MoeForCausalLM", vocab_size=1, hidden_size=1, num_layers=2, num_heads=1, num_kv_heads=1,
    head_dim=2, intermediate_size=1, rms_norm_eps=1e-6, rope=RopeConfig(), max_position_embeddings=1,
    moe=MoeConfig(4, 2, 1, dense_layers=(0,)),
)  # fmt: skip


def test_each_layer_has_its_placement(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    path.write_text(loads_of([], [9, 1, 1, 1]))
    assert placements_of(path, CONFIG, 2, 2) == ((), (0, 1, 2, 0, 1, 3))
    sharded = of_layer(replace(CONFIG, expert_slots=placements_of(path, CONFIG, 2, 2)), 1)
    assert sharded.moe is not None
    assert sharded.moe.num_slots == 6


def loads_of(*layers: list[Any]) -> str:
    return json.dumps({"num_experts": 4, "layers": layers})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((text, "no loads of experts in it") for text in ("", "[]", "{}", '{"num_experts": null}')),
        (loads_of(["x"]), "no loads of experts in it"),
        *((loads_of([], *more), "another model") for more in ([], [[1] * 3], [[1] * 4, []])),
        (loads_of([1] * 4, [1] * 4), "another model"),
        (None, "No such file"),
    ],
)
def test_files_without_loads_of_the_model_are_refused(text: str | None, told: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "loads").write_text(text)
    with pytest.raises(ConfigError, match=told):
        placements_of(tmp_path / "loads", CONFIG, 2, 0)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    path.write_text(loads_of([], []))
    with pytest.raises(ConfigError, match="the model has no experts"):
        placements_of(path, replace(CONFIG, moe=None), 2, 0)
    with pytest.raises(ConfigError, match="the model has no experts"):
        LLM("dry-run", device="cpu", expert_load_file=str(path))


def make_recorder(slots: tuple[int, ...], path: Path | None = None) -> tuple[ExpertLoadRecorder, Moe]:
    """Make a recorder for one layer of experts on two ranks."""
    assert CONFIG.moe is not None
    config = replace(CONFIG, moe=replace(CONFIG.moe, slots=slots, expert_ranks=2))
    block = Moe(config, DummyWeights(torch.float32, torch.device("cpu")), "mlp", "norm")
    model = SimpleNamespace(config=config, blocks=[block])
    return ExpertLoadRecorder(model, path), block  # type: ignore[arg-type]


def count(block: Moe, new: list[int]) -> None:
    assert block.loads is not None
    block.loads += torch.tensor(new)


def test_ranks_are_counted_by_the_experts_that_they_have(tmp_path: Path) -> None:
    """Counts are those of a window; older ones only count in totals."""
    recorder, block = make_recorder((0, 1, 2, 0, 1, 3), tmp_path / "loads")
    recorder.take(recorder.start_copy().values)
    assert (recorder.rank_tokens, recorder.balancedness) == ([0.0, 0.0], 0.0)
    for new in [[0, 0, 4, 0], *[[2, 2, 0, 0]] * NUM_READS]:  # only the first rank has expert 2; both have 0 and 1
        count(block, new)
        recorder.take(recorder.start_copy().values)
        if new[2]:
            assert (recorder.rank_tokens, recorder.balancedness) == ([4.0, 0.0], 0.5)
    assert recorder.rank_tokens == [4.0 + 2 * NUM_READS, 2.0 * NUM_READS]
    assert recorder.balancedness == 1.0
    recorder.restart()
    recorder.write()
    assert json.loads((tmp_path / "loads").read_text())["layers"] == [[], [0, 0, 0, 0]]


def test_a_file_that_cannot_be_written_any_more_stops_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    recorder, block = make_recorder((), tmp_path / "folder" / "loads")
    (tmp_path / "folder" / "loads").unlink()
    (tmp_path / "folder").rmdir()
    count(block, [1, 2, 3, 4])
    monkeypatch.setattr("time.monotonic", lambda: inf)
    recorder.poll()
    assert recorder.rank_tokens == [3.0, 7.0]
    assert "loads of experts are not written" in caplog.text


def test_a_layer_is_placed_anew_when_its_ranks_are_uneven() -> None:
    """It needs enough tokens, and only those since the last check count."""
    recorder, block = make_recorder((0, 1, 2, 3))
    rebalancer = Rebalancer(recorder, interval=3)

    def steps(new: list[int]) -> list[PlacedExperts]:
        """Return the changes within an interval, executed as ranks do."""
        count(block, new)
        changes = [change for change in (rebalancer.next_change() for _ in range(3)) if change is not None]
        for change in changes:
            assert block.slots is not None
            block.slots.place(change.slots)
        return changes

    assert steps([480, 480, 32, 16]) == []  # too few; they count at the next check, too
    (change,) = steps([16, 0, 0, 0])
    assert (change.index, set(change.slots[:2])) in [(0, {0, 2}), (0, {0, 3})]
    assert steps([1000, 999, 1000, 999]) == []  # as even as before
    hot = change.slots[:2]
    (again,) = steps([5000 * (expert in hot) for expert in range(4)])
    assert len({*hot} & {*again.slots[:2]}) == 1
    assert rebalancer.num_changes == 2
