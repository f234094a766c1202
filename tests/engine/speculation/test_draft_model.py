"""A draft model on a CPU: the tokens of an engine without it, and drafts that equal the draft model's own answers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.assembly import EngineParts
from engine.speculation import from_model
from engine.speculation.draft_model import FromCpuDraftModel, VocabSizes
from engine.speculation.open_draft_model import have_same_tokens
from tests.engine.driving import answers, finish, num_drafts
from tests.engine.speculation.opening import PLAIN, SETTINGS, check_unchanged, open_parts, rows_with_drafts
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE

pytestmark = pytest.mark.slow
ALWAYS = {"adaptive_drafts": False, "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: TINY_MODELS[name].save(tmp_path_factory.mktemp(name)) for name in ("llama", "qwen2")}


def drafted_by(models: dict[str, Path], name: str, **settings: Any) -> EngineParts:
    return open_parts(models["llama"], speculative=f"draft:{models[name]}", quant_mode="none", **settings)


def proposer_of(parts: EngineParts) -> FromCpuDraftModel:
    proposer = parts.runner._proposer
    assert isinstance(proposer, FromCpuDraftModel)
    return proposer


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("qwen2", each) for each in SETTINGS[1:]),
        *(("llama", each) for each in ({}, SETTINGS[-1], {"prefix_cache": False})),
    ],
    ids=str,
)
def test_no_draft_changes_an_answer(models: dict[str, Path], name: str, settings: dict[str, Any]) -> None:
    """A model agrees with itself, also for sampled tokens: it uses the request's parameters and noise."""
    parts = drafted_by(models, name, **ALWAYS, **settings)
    check_unchanged(parts, models["llama"], **settings)
    drafted, accepted = num_drafts(parts.engine)
    assert drafted > 100
    assert name != "llama" or accepted > 0.9 * drafted  # rounding differs between steps of different sizes
    assert_all_is_free(parts)


def assert_all_is_free(parts: EngineParts) -> None:
    """Check that the next step frees the last requests and the draft model's blocks."""
    answers(parts.engine, [[1, 2, 3]], replace(PLAIN, max_tokens=1, num_speculative_tokens=0))
    pool = proposer_of(parts)._kv.pool
    pool.check_integrity()
    assert pool.num_used == 0


def test_prompts_are_computed_once(models: dict[str, Path]) -> None:
    """This holds for the draft model, too: it has its own prefix cache."""
    parts = drafted_by(models, "llama", **ALWAYS, block_size=8)
    prompt = [(7 * i) % VOCAB_SIZE for i in range(100)]
    for _ in range(2):
        request = parts.engine.add_request(prompt, PLAIN)
        finish(parts.engine)
    assert request.num_cached_tokens == 96
    last = proposer_of(parts)._followed[request.request_id]
    assert last.owner.num_published_blocks >= 12
    assert proposer_of(parts)._kv.prefixes.cached_table(last.owner, 96) == last.owner.block_ids[:12]


def test_a_long_prompt_is_taken_in_parts(models: dict[str, Path]) -> None:
    """After a step, the draft model computes at most a step's prompt tokens; others get drafts meanwhile."""
    parts = drafted_by(models, "llama", **ALWAYS, max_num_batched_tokens=16, max_num_seqs=4)
    first = parts.engine.add_request([1, 2, 3], replace(PLAIN, max_tokens=60))
    long = parts.engine.add_request(list(range(8, 108)), replace(PLAIN, max_tokens=30))
    runner = proposer_of(parts).runner
    sizes: list[int] = []
    run_rows = runner.run
    runner.run = lambda rows, states: sizes.append(sum(r.num_tokens for r in rows)) or run_rows(rows, states)  # type: ignore
    drafted = {(row.request_id, row.start) for row in rows_with_drafts(parts.engine)}
    assert max(sizes) == 16
    assert sum(name == long.request_id for name, _ in drafted) > 2
    assert sum(name == first.request_id and start < 20 for name, start in drafted) >= 3


def test_trials_do_not_come_sooner_with_more_requests(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial may make the draft model compute a whole prompt."""
    monkeypatch.setattr(from_model, "STEPS_BETWEEN_TRIALS", 20)
    parts = drafted_by(models, "llama")
    proposer = proposer_of(parts)
    proposer._least_probability = lambda num_rows, num_drafting: 1.0  # type: ignore[method-assign]
    for number in range(8):
        parts.engine.add_request([1, 2, number], replace(PLAIN, max_tokens=70, ignore_eos=True))
    trials: list[Any] = []
    draft = proposer._draft

    def counted(wanted: list[Any], num_rows: int) -> None:
        trials.extend(wanted)
        draft(wanted, num_rows)

    proposer._draft = counted  # type: ignore[method-assign]
    finish(parts.engine)
    assert 2 <= len(trials) <= 4


def test_tokens_that_the_draft_model_lacks(models: dict[str, Path]) -> None:
    """Vocabularies may have unused tokens at the end; a request with such a token gets no drafts."""
    parts = drafted_by(models, "llama", **ALWAYS)
    proposer = proposer_of(parts)
    proposer._vocab_sizes = replace(proposer._vocab_sizes, of_draft=VOCAB_SIZE - 8)
    requests = [parts.engine.add_request(prompt, PLAIN) for prompt in ([1, 2, VOCAB_SIZE - 1], [1, 2, 3])]
    assert {row.request_id for row in rows_with_drafts(parts.engine)} == {requests[1].request_id}


def test_another_tokenizer_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    text = load_tokenizer(resolve_model("dry-run"))._backend.to_str()
    folders = []
    for name in ("target", "same", "other"):
        folders.append(tmp_path / name)
        shutil.copytree(models["llama"], folders[-1])
        found = json.loads(text)
        vocabulary = found["model"]["vocab"]
        if name == "other":
            vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (folders[-1] / "tokenizer.json").write_text(json.dumps(found))
    target, same, other = folders
    open_parts(target, speculative=f"draft:{same}")
    with pytest.raises(ConfigError, match=f"choose a model with the tokenizer of {target}"):
        open_parts(target, speculative=f"draft:{other}")
    without = resolve_model(str(models["llama"]))
    assert have_same_tokens(resolve_model(str(target)), without, VocabSizes(9, 9))
    assert not have_same_tokens(resolve_model(str(target)), without, VocabSizes(9, 8))


def test_no_drafts_where_the_draft_models_context_ends(models: dict[str, Path]) -> None:
    parts = drafted_by(models, "llama", **ALWAYS)
    proposer_of(parts)._max_model_len = 20
    request = parts.engine.add_request([1, 2, 3], PLAIN)
    assert max(row.stop for row in rows_with_drafts(parts.engine)) <= 20
    assert len(request.output_token_ids) == PLAIN.max_tokens


@pytest.mark.wing("engine.transformers_models")
def test_transformers_code_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="transformers' code computes no draft models"):
        open_parts(models["llama"], speculative=f"draft:{models['llama']}", model_impl="transformers")
