"""A draft model next to the model, on a GPU or through Triton's interpreter: drafts change no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import engine.speculation.proposer
from common.errors import ConfigError
from common.step_times import StepCost
from engine.config import EngineConfig, GpuConfig
from engine.engine import Engine
from engine.loader.load import LoadedModel
from engine.request import SamplingParams
from engine.speculation.acceptance import Acceptance, DraftRecord, Rate
from engine.speculation.draft_length import DraftLengths
from engine.speculation.drafts import Speculation
from engine.speculation.on_gpu.draft_model import FromGpuDraftModel, best_length
from engine.speculation.on_gpu.open_draft_model import load_on_gpu
from engine.speculation.overlap import Overlap
from tests.engine.driving import num_drafts
from tests.gpu.models import save_tiny_model
from tests.gpu.speculation.test_drafts import MAX_TOKENS, PLAIN, assert_same_answers, run
from tests.gpu.speculation.test_overlapped_drafts import Changing
from tests.gpu.test_engine import open_gpu, reference

pytestmark = pytest.mark.wing("engine.speculation")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a model, and one with negated logits."""
    found = {name: save_tiny_model(tmp_path_factory.mktemp(name)) for name in ("same", "other")}
    tensors = load_file(found["other"] / "model.safetensors")
    save_file({**tensors, "model.norm.weight": -tensors["model.norm.weight"]}, found["other"] / "model.safetensors")
    return found


def drafted_by(
    models: dict[str, Path], draft: str, monkeypatch: pytest.MonkeyPatch, overlap: Overlap | None = None,
    is_adaptive: bool = False, open_engine: Callable[..., Any] = open_gpu, **settings: Any,
) -> tuple[Engine, FromGpuDraftModel]:  # fmt: skip
    proposers = []

    def speculation(
        config: EngineConfig, runner: Any, loaded: LoadedModel, _: object, num_blocks: int
    ) -> Speculation:
        lengths = DraftLengths(is_adaptive)
        opened = load_on_gpu(str(models[draft]), config, loaded, GpuConfig())
        proposers.append(opened.open(num_blocks, 3, lengths, overlap))
        runner.propose_with(proposers[0])
        return Speculation(lengths, config.max_num_seqs, overlap)

    monkeypatch.setattr(engine.speculation.proposer, "open_speculation", speculation)
    settings = {"num_speculative_tokens": 3, "max_num_seqs": MAX_TOKENS, **settings}
    made, _ = open_engine(models["same"], monkeypatch, GpuConfig(), **settings)
    return made, proposers[0]


def test_drafts_change_no_token(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model is often wrong, and drafts reach into blocks that requests do not have yet."""
    expected = run(reference(models["same"]))
    made, proposer = drafted_by(models, "other", monkeypatch, block_size=4, num_gpu_blocks=22, max_model_len=88)
    assert_same_answers(run(made), expected)
    drafted, accepted = num_drafts(made)
    assert drafted > 8
    assert accepted < drafted
    assert_all_is_free(made, proposer)


def assert_all_is_free(made: Engine, proposer: FromGpuDraftModel) -> None:
    """Run another request, whose steps free the last requests and the draft model's blocks, and check the pool."""
    made.add_request([1, 2, 3], replace(PLAIN, max_tokens=1, num_speculative_tokens=0))
    while made.has_work():
        made.step()
    proposer._kv.pool.check_integrity()
    assert proposer._kv.pool.num_used == 0


def test_a_model_agrees_with_itself_over_long_answers(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step takes what the draft model computed for drafts that were right, and one token that it lacks."""
    made, proposer = drafted_by(models, "same", monkeypatch)
    params = SamplingParams(max_tokens=29, temperature=0.9, seed=3, ignore_eos=True)
    made.add_request([5, 6, 7], params)
    while made.has_work():
        made.step()
    assert num_drafts(made) == (21, 21)
    assert made.num_steps == 8
    assert_all_is_free(made, proposer)


def test_nothing_is_drafted_while_steps_overlap(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = run(reference(models["same"]))
    lengths = DraftLengths(False)
    overlap = Changing(lengths)
    made, proposer = drafted_by(models, "same", monkeypatch, overlap)
    drafting: list[bool] = []
    draft = proposer._draft

    def noted(*args: Any) -> None:
        drafting.append(overlap.waits)
        draft(*args)

    monkeypatch.setattr(proposer, "_draft", noted)
    requests, _ = run(made)
    assert [request.output_token_ids for request in requests] == [request.output_token_ids for request in plain]
    assert drafting
    assert all(drafting)
    assert num_drafts(made)[0] > 0


def test_passes_are_as_many_as_pay() -> None:
    records = {"right": DraftRecord(rate=Rate(0.9, 9.5, 10.0)), "wrong": DraftRecord(rate=Rate(0.9, 0.5, 10.0))}
    lengths, acceptance = DraftLengths(), Acceptance(10)

    def chosen(*names: str, num_rows: int) -> int:
        return best_length([(records[name], 3) for name in names], num_rows, lengths, 1e-3, acceptance)

    assert chosen("wrong", num_rows=1) == 3  # nothing is known of times yet
    lengths._costs._times.cost = StepCost(base=6e-3, row=1e-4)
    assert chosen("right", num_rows=1) == 3
    assert chosen("wrong", num_rows=1) == 1
    assert chosen("wrong", "right", "right", "right", num_rows=4) == 3  # a pass is for all of them
    assert chosen("right", num_rows=60) == 1  # one row of many


def test_stages_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="leave out --pp"):
        load_on_gpu(str(models["same"]), EngineConfig("m", pp=2), None, GpuConfig())  # type: ignore[arg-type]
