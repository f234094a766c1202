"""Rejection sampling in an engine on a CPU, by a draft model or a head: answers distributed as without drafts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from common.grammar import grammar
from common.lora.adapter_ref import AdapterRef
from engine.assembly import EngineParts
from engine.request import SamplingParams
from tests.engine.chi_square import fit_together
from tests.engine.combinations import MODELS
from tests.engine.driving import answers, finish, num_drafts
from tests.engine.expert_balancing.balancing import balancing_of
from tests.engine.speculation.eagle.heads import DRAFT_VOCAB, RandomHead
from tests.engine.speculation.opening import PARAMS, PLAIN, PROMPTS, SETTINGS, open_parts, plain_run, run
from tests.engine.speculation.test_draft_model import assert_all_is_free
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE
from tests.engine.transformers_models.hf_families import FAMILIES
from tests.harness.adapters import write_adapter

pytestmark = pytest.mark.slow
REJECTION = {
    "speculative_sampling": "rejection", "adaptive_drafts": False, "num_speculative_tokens": 3, "quant_mode": "none",
}  # fmt: skip
CHOICES, NUM_TOKENS = (21, 55, 89), 4  # tokens that answers are made of
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=CHOICES, seed_is_drawn=True)
NUM_SEEDS, LIKELY, UNLIKELY = 250, 1e-3, 1e-6  # this many answers still tell a wrong rule from the right one
KINDS = {
    "temperature": SAMPLED,
    "penalties": replace(SAMPLED, temperature=0.8, presence_penalty=1.0, logit_bias=((21, 1.0),)),
    "top-p": replace(SAMPLED, allowed_token_ids=(*CHOICES, 34), temperature=1.5, top_p=0.7, logprobs=2),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the target model, and the drafter as --speculative names it."""
    llama, qwen = (TINY_MODELS[name].save(tmp_path_factory.mktemp(name)) for name in ("llama", "qwen2"))
    head, few = (RandomHead(draft_vocab=size).save(tmp_path_factory.mktemp("head")) for size in (0, DRAFT_VOCAB))
    drafters = {"draft": f"draft:{qwen}", "eagle": f"eagle:{head}", "few": f"eagle:{few}"}
    return {"target": str(llama), **drafters}


def drafted_by(paths: dict[str, str], name: str, **settings: Any) -> EngineParts:
    return open_parts(Path(paths["target"]), speculative=paths[name], **{**REJECTION, **settings})


def sample(parts: EngineParts, params: SamplingParams, seeds: range) -> list[tuple[int, ...]]:
    """Return answers to one prompt, one for each seed."""
    return [
        *map(tuple, answers(parts.engine, [[5, 6, 7]] * len(seeds), [replace(params, seed=seed) for seed in seeds]))
    ]


def likelihood(found: list[tuple[int, ...]], others: list[tuple[int, ...]], params: SamplingParams) -> float:
    """Return the p-value of the hypothesis that both are answers of one model."""
    counts, other_counts = Counter(found), Counter(others)
    assert {token for answer in found for token in answer} <= {*params.allowed_token_ids}
    cells = list(product(params.allowed_token_ids, repeat=NUM_TOKENS))
    return fit_together([counts[cell] for cell in cells], [other_counts[cell] for cell in cells])


@cache
def plain_answers(target: str, kind: str) -> list[tuple[int, ...]]:
    """Return answers without drafts, with other seeds, so that they share no noise."""
    parts = open_parts(Path(target), quant_mode="none")
    return sample(parts, KINDS[kind], range(10**6, 10**6 + 2 * NUM_SEEDS))


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [
        ("draft", "top-p"),
        ("eagle", "temperature"),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("draft", "penalties"), ("few", "temperature"))),
    ],
)
def test_answers_are_distributed_as_without_drafts(paths: dict[str, str], drafter: str, kind: str) -> None:
    """Compares all tokens together; more drafts are accepted than by coupled noise.

    few: a head that knows one of the tokens, for which both accept equally many.
    """
    params, shares = KINDS[kind], []
    for sampling, num_seeds in (("rejection", NUM_SEEDS), ("coupled", NUM_SEEDS // 3)):
        parts = drafted_by(paths, drafter, speculative_sampling=sampling)
        found = sample(parts, params, range(num_seeds))
        drafted, accepted = num_drafts(parts.engine)
        assert accepted > num_seeds / 5
        shares.append(accepted / drafted)
        assert likelihood(found, plain_answers(paths["target"], kind), params) > LIKELY
    assert shares[0] > shares[1] - (0.05 if drafter == "few" else 0.0)


@pytest.mark.parametrize(
    ("drafter", "settings"),
    [("eagle", {}), *(("draft", settings) for settings in (SETTINGS[-1], {"adaptive_drafts": True}))],
    ids=str,
)
def test_greedy_and_seeded_answers_stay_as_they_are(
    paths: dict[str, str], settings: dict[str, Any], drafter: str
) -> None:
    """Together with requests that use rejection sampling, in small steps, and with preemptions."""
    plain, _ = plain_run(Path(paths["target"]), quant_mode="none", **settings)
    parts = drafted_by(paths, drafter, **settings)
    for _ in range(2 if "preemption" in settings else 1):  # the second time from the prefix caches
        others = [
            parts.engine.add_request(prompt, replace(params, seed_is_drawn=True))
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
        requests, _ = run(parts.engine)
        assert [request.output_token_ids for request in requests] == [request.output_token_ids for request in plain]
        assert all(len(request.output_token_ids) >= 9 for request in others)
    if "adaptive_drafts" not in settings:
        assert num_drafts(parts.engine)[0] > 50
    if drafter == "draft":
        assert_all_is_free(parts)


@pytest.mark.parametrize("name", [*(name for name in MODELS if "int8" not in name), "with adapters"])
def test_models_of_all_kinds(name: str, tmp_path: Path, paths: dict[str, str]) -> None:
    """Greedy answers of a model that drafts for itself."""
    settings: dict[str, Any] = {"quant_mode": "none"}
    path = MODELS[name][0](tmp_path / "m") if name in MODELS else Path(paths["target"])
    if name in MODELS:
        settings |= MODELS[name][1]
    else:
        shapes = {n: tuple(t.shape) for n, t in load_file(path / "model.safetensors").items() if t.dim() == 2}
        settings |= {"enable_lora": True, "lora_modules": f"own={write_adapter(tmp_path / 'own', shapes, std=0.2)}"}
    adapter = str(AdapterRef.of(tmp_path / "own")) if name == "with adapters" else ""

    def answer(**drafts: Any) -> tuple[list[list[int]], EngineParts]:
        parts = open_parts(path, **{**settings, **drafts})
        return answers(parts.engine, PROMPTS, PLAIN, adapter=adapter), parts

    expected, _ = answer()
    found, parts = answer(speculative=f"draft:{path}", **REJECTION)
    assert found == expected
    assert num_drafts(parts.engine)[1] > 0


@pytest.mark.wing("engine.transformers_models")
def test_answers_by_transformers_code(paths: dict[str, str], tmp_path: Path) -> None:
    """Distributed as without drafts; the draft model runs by our own code."""
    target = str(replace(FAMILIES["gpt_neox"], changes={"vocab_size": VOCAB_SIZE}).save(tmp_path))
    parts = drafted_by({**paths, "target": target}, "draft")
    assert type(parts.runner).__name__ == "TransformersRunner"
    found = sample(parts, SAMPLED, range(NUM_SEEDS))
    assert num_drafts(parts.engine)[1] > NUM_SEEDS / 5
    assert likelihood(found, plain_answers(target, "temperature"), SAMPLED) > LIKELY


@pytest.mark.wing("engine.expert_balancing")
def test_experts_are_counted_of_drafts_that_are_verified(tmp_path: Path) -> None:
    """Counts include rejected drafts, but not the draft model's own experts; no answer changes."""
    target, other = (str(TINY_MODELS[name].save(tmp_path / name)) for name in ("qwen3-moe", "qwen2-moe"))
    models, loads = {"target": target, "draft": f"draft:{other}"}, tmp_path / "loads.json"
    seeds = range(50)
    expected = sample(drafted_by(models, "draft"), SAMPLED, seeds)
    parts = drafted_by(models, "draft", expert_load_file=str(loads))
    assert sample(parts, SAMPLED, seeds) == expected
    drafted, accepted = num_drafts(parts.engine)
    assert 0 < accepted < drafted
    balancing_of(parts).loads.write()
    num_computed = len(seeds) * (3 + NUM_TOKENS - 1) + drafted - accepted  # a token has three experts
    assert [sum(layer) for layer in json.loads(loads.read_text())["layers"]] == [3 * num_computed] * 3


def test_seeds_that_the_engine_draws(paths: dict[str, str]) -> None:
    """Only a sampled request whose seed the engine draws is sampled by rejection."""
    parts = drafted_by(paths, "draft")
    sampled = replace(PLAIN, temperature=1.0)
    asked = (sampled, replace(sampled, seed=3), replace(sampled, num_speculative_tokens=0))
    requests = [parts.engine.add_request([5, 6], params) for params in asked]
    assert [request.params.seed_is_drawn for request in requests] == [True, False, True]
    drafts: dict[str, int] = Counter()
    kept = set()
    while parts.engine.has_work():
        for row in parts.engine.step().plan.rows:
            drafts[row.request_id] += len(row.draft_token_ids)
        states = parts.runner._requests._states.values()
        kept |= {state.request_id for state in states if state.drafter and state.drafter.distributions}
    assert kept == {requests[0].request_id}
    assert [drafts[request.request_id] > 0 for request in requests] == [True, True, False]


def test_log_probabilities_are_of_the_tokens_that_came(paths: dict[str, str]) -> None:
    """Also for replacements: equal to those of the whole answer as a prompt."""
    params = replace(PLAIN, temperature=1.0, seed=1, seed_is_drawn=True, logprobs=2)
    parts = drafted_by(paths, "draft")
    request = parts.engine.add_request([5, 6, 7], params)
    entries = [entry for output in finish(parts.engine) for entry in output.logprobs]
    drafted, accepted = num_drafts(parts.engine)
    assert 0 < accepted < drafted
    assert [entry.token_id for entry in entries] == request.output_token_ids
    asked = replace(PLAIN, max_tokens=1, prompt_logprobs=2)
    whole = parts.engine.add_request([5, 6, 7, *request.output_token_ids], asked)
    told = [entry for output in finish(parts.engine) for entry in output.prompt_logprobs]
    assert whole.num_prompt_tokens == 3 + PLAIN.max_tokens
    for entry, other in zip(entries, told[-PLAIN.max_tokens :], strict=True):
        assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.wing("engine.grammar")
@pytest.mark.usefixtures("byte_tokens")
def test_answers_that_follow_a_grammar(paths: dict[str, str]) -> None:
    """Drafts ignore it: forbidden ones are replaced by allowed tokens, distributed as without drafts."""
    allowed = tuple(range(97, 103))
    params = SamplingParams(
        max_tokens=NUM_TOKENS, grammar=grammar.regex("[a-c][d-f][a-c][d-f]"), temperature=1.0, seed_is_drawn=True,
        logit_bias=tuple((token, 4.0) for token in allowed),
    )  # fmt: skip
    parts = drafted_by(paths, "draft")
    counts = Counter(sample(parts, params, range(NUM_SEEDS)))
    plain = open_parts(Path(paths["target"]), quant_mode="none")
    others = Counter(sample(plain, params, range(10**6, 10**6 + 2 * NUM_SEEDS)))
    assert num_drafts(parts.engine)[1] > 50
    cells = [*{*counts, *others}]
    assert {cell[0] for cell in cells} <= {allowed[0], allowed[1], allowed[2]}
    assert fit_together([counts[cell] for cell in cells], [others[cell] for cell in cells]) > LIKELY


def test_a_request_that_another_worker_goes_on_with(paths: dict[str, str]) -> None:
    """After a kill, it continues after the sent tokens: its distribution stays, but further tokens may differ.

    With a seed that the client chose they do not differ.
    """
    first, second = drafted_by(paths, "draft"), drafted_by(paths, "draft")

    def resumed(params: SamplingParams, whole: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        requests = [
            second.engine.add_request([5, 6, 7], replace(params, seed=seed), output_token_ids=answer[:2])
            for seed, answer in enumerate(whole)
        ]
        finish(second.engine)
        return [tuple(request.output_token_ids) for request in requests]

    whole = sample(first, SAMPLED, range(NUM_SEEDS))
    found = resumed(SAMPLED, whole)
    assert likelihood(found, plain_answers(paths["target"], "temperature"), SAMPLED) > LIKELY
    num_other = sum(one != other for one, other in zip(whole, found, strict=True))
    assert 0 < num_other < NUM_SEEDS
    seeded = replace(SAMPLED, seed_is_drawn=False)
    whole = sample(first, seeded, range(25))
    assert resumed(seeded, whole) == whole
