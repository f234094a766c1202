"""An EAGLE-3 head, or a module of the model, in an engine on a CPU: the tokens of an engine without it.

They do not depend on where a request's KV comes from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from engine.assembly import EngineParts
from engine.speculation.from_model import FIRST_PAUSE
from engine.speculation.heads.proposer import Followed, FromHead
from engine.speculation.proposer import open_speculation
from tests.engine.driving import directory, engine_config, finish, num_drafts, open_model
from tests.engine.speculation.eagle.heads import RandomHead
from tests.engine.speculation.mtp.modules import ModelWithModule
from tests.engine.speculation.opening import PARAMS, PLAIN, PROMPTS, SETTINGS, check_unchanged, open_parts, plain_run
from tests.engine.tiny_models import TINY_MODELS

pytestmark = pytest.mark.slow
ALWAYS = {"adaptive_drafts": False, "num_speculative_tokens": 4, "quant_mode": "none"}


@pytest.fixture(scope="module", params=["eagle", pytest.param("mtp", marks=pytest.mark.wing("engine.mla"))])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(method: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return ModelWithModule().save(path) if method == "mtp" else TINY_MODELS["llama"].save(path)


@pytest.fixture(scope="module")
def head(method: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the head's name for --speculative."""
    return method if method == "mtp" else f"eagle:{RandomHead().save(tmp_path_factory.mktemp('head'))}"


def drafted_by(model: Path, head: str, **settings: Any) -> EngineParts:
    return open_parts(model, **{"speculative": head, **settings})


def proposer_of(parts: EngineParts) -> FromHead:
    proposer = parts.runner._proposer
    assert isinstance(proposer, FromHead)
    return proposer


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS[-1],  # chunks and steps without the prefix cache are those of eagle/test_head.py, mtp/test_module.py
        pytest.param({"batch_invariant": True}, marks=pytest.mark.soak),
        {"dtype": "bfloat16", "batch_invariant": True},  # as models are served, by other GEMMs
        pytest.param({"tp": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_no_draft_changes_an_answer(model: Path, head: str, settings: dict[str, Any]) -> None:
    """Greedy and sampled, with penalties, in batches, small steps, and with preemptions."""
    parts = drafted_by(model, head, **ALWAYS, **settings)
    check_unchanged(parts, model, **settings)
    drafted, accepted = num_drafts(parts.engine)
    assert drafted > 50
    assert accepted < drafted / 2


def test_a_request_that_is_handed_over(model: Path, head: str) -> None:
    """As between workers. The head has not seen the prompt, unless it is too short to be pulled."""
    expected, _ = plain_run(model, quant_mode="none")
    prefill, decode = (drafted_by(model, head, **ALWAYS) for _ in range(2))
    seen: list[int] = []
    for prompt, params, plain in zip(PROMPTS[::2], PARAMS[::2], expected[::2], strict=True):
        sent = prefill.engine.add_request(prompt, params, prefill_only=True)
        finish(prefill.engine)
        leased = prefill.engine.kv.detach(sent, sent.num_known_tokens - 1)
        request = decode.engine.add_request(
            prompt, params, output_token_ids=sent.output_token_ids, kv_source="lease", num_source_tokens=len(prompt)
        )
        [job] = decode.engine.step().loads
        decode.runner._pool[job.block_ids] = prefill.runner._pool[[leased[position] for position in job.positions]]
        decode.engine.finish_load(job, True)
        while decode.engine.has_work():
            decode.engine.step()
            seen += [state.drafter.kv.first for state in decode.runner._requests._states.values() if state.drafter]
        assert request.output_token_ids == plain.output_token_ids
    assert set(seen) == {len(prompt) if len(prompt) > 16 else 0 for prompt in PROMPTS[::2]}
    assert num_drafts(decode.engine)[0] > 50
    assert num_drafts(prefill.engine) == (0, 0)


def test_a_prompt_from_the_prefix_cache(model: Path, head: str) -> None:
    """The head drafts from the tokens that are computed here."""
    parts = drafted_by(model, head, **ALWAYS, block_size=8)
    firsts = []
    for _ in range(2):
        request = parts.engine.add_request(list(range(50)), PLAIN)
        while parts.engine.has_work():
            parts.engine.step()
            firsts += [followed_by(parts, request.request_id).kv.first] if request.output_token_ids else []
    assert request.num_cached_tokens == 48
    assert set(firsts) == {0, 48}


def followed_by(parts: EngineParts, request_id: str) -> Followed:
    followed = parts.runner._requests._states[request_id].drafter
    assert isinstance(followed, Followed)
    return followed


def test_drafts_that_are_never_right_are_tried_ever_less(model: Path, head: str) -> None:
    """As with a draft model; the head's K and V are computed meanwhile, because the next trial needs them."""
    parts = drafted_by(model, head, quant_mode="none")
    proposer = proposer_of(parts)
    proposer._least_probability = lambda num_rows, num_drafting: 0.3  # type: ignore[method-assign]
    params = replace(PLAIN, max_tokens=240)
    request = parts.engine.add_request([1, 2, 3], params)
    num_passes = 0
    logits_of = proposer._head.logits

    def counted(outputs: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        return logits_of(outputs)

    proposer._head.logits = counted  # type: ignore[method-assign]
    finish(parts.engine)
    followed = followed_by(parts, request.request_id)
    assert followed.pause > 4 * FIRST_PAUSE
    assert (followed.kv.first, followed.kv.end) == (0, 242)
    assert num_passes < 40


@pytest.mark.wing("engine.pooling")
def test_nothing_is_computed_for_vectors_and_prompts_of_others(model: Path, head: str) -> None:
    parts = drafted_by(model, head, **ALWAYS)
    requests = [
        parts.engine.add_request(list(range(20)), replace(PLAIN, pooling="last", max_tokens=1)),
        parts.engine.add_request(list(range(30)), PLAIN, prefill_only=True),
    ]
    parts.engine.step()
    states = parts.runner._requests._states
    assert [states[request.request_id].drafter for request in requests] == [None, None]


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"pp": 2}, "leave out --pp"), ({"simulated_steps": "base=0.01"}, "--simulated-steps compute nothing")],
    ids=str,
)
def test_engines_without_hidden_states_are_refused(
    model: Path, head: str, settings: dict[str, Any], told: str
) -> None:
    loaded, _ = open_model(directory(model), dtype="float32")
    with pytest.raises(ConfigError, match=told):
        open_speculation(engine_config(str(model), speculative=head, **settings), None, loaded)


@pytest.mark.wing("engine.transformers_models")
def test_models_by_transformers_code_are_refused(model: Path, head: str) -> None:
    with pytest.raises(ConfigError, match="models by transformers' code do not give"):
        drafted_by(model, head, model_impl="transformers", load_format="dummy")
