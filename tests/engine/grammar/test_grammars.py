"""Answers that follow a grammar, on the tiny random model: nothing that the engine does changes a token of them."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import pytest
from llguidance import LLMatcher

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.reasoning.reasoning_format import THINK, lark_before_answer
from engine.grammar import mask_thread
from engine.grammar.grammars import Grammars
from mini_infer import LLM, SamplingParams
from tests.engine.driving import finish, num_drafts

PERSON = grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{2,9}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
WORDS = grammar.regex("([a-f]{3} ){4}end")
BUDGET = 40, frozenset({ord("<"), ord(">"), 257})  # bytes stand for the markers
THOUGHT = grammar.after(
    lark_before_answer(THINK, True, {"<think>": ord("<"), "</think>": ord(">")}, BUDGET), grammar.regex("[a-f]{9}")
)
PROMPTS = ["a", "The quick brown fox " * 6, "0123456789" * 20]
PARAMS = [
    SamplingParams(max_tokens=300, temperature=0.0, grammar=PERSON),
    SamplingParams(max_tokens=300, temperature=1.3, seed=5, grammar=PERSON, presence_penalty=0.5),
    SamplingParams(max_tokens=300, temperature=1.0, seed=6, grammar=WORDS),
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=99, temperature=1.0, seed=7, grammar=THOUGHT),
    SamplingParams(max_tokens=99, temperature=0.0, grammar=THOUGHT),  # it repeats itself: drafts
]


def make(**settings: Any) -> LLM:
    return LLM("dry-run", num_threads=1, **{"num_gpu_blocks": 256, **settings})


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Run each prompt with each set of parameters, alone and without caches."""
    llm = make(prefix_cache=False, max_num_batched_tokens=2048)
    return [llm.generate(prompt, params)[0].token_ids for params in PARAMS for prompt in PROMPTS]


def check_person(text: str) -> None:
    person = json.loads(text)
    assert re.fullmatch("[a-z]{2,9}", person["name"])
    assert 0 <= person["age"] <= 150
    assert 1 <= len(person["tags"]) <= 4
    assert set(person["tags"]) <= {"red", "green"}


def test_answers_follow_the_grammar_and_end() -> None:
    llm = make()
    for params in PARAMS[:2]:
        for completion in llm.generate(PROMPTS, params):
            check_person(completion.text)
            assert completion.finish_reason == "stop"
    for completion in llm.generate(PROMPTS, PARAMS[2]):
        assert re.fullmatch("([a-f]{3} ){4}end", completion.text)
    for completion in llm.generate(PROMPTS, PARAMS[4]) + llm.generate(PROMPTS, PARAMS[5]):
        assert completion.token_ids.index(ord(">")) <= BUDGET[0]
        assert re.search(">[ \n]{0,4}[a-f]{9}$", completion.text)


def test_a_long_answer_goes_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes over an answer follows all its tokens before its first mask: 40 ms of them."""
    llm = make()
    grammars = Grammars(lambda: llm.tokenizer, llm.tokenizer.vocab_size)
    budget = 100_000, BUDGET[1]
    before = lark_before_answer(THINK, True, {"<think>": ord("<"), "</think>": ord(">")}, budget)
    answer = grammar.after(before, grammar.regex("[a-f]{9}"))
    matcher, other = (grammars.start(answer).result() for _ in range(2))
    began = time.process_time()
    assert other.allowed(list(b"x" * 60_000)) is not None
    all_seconds = time.process_time() - began
    # All tokens in one piece take too long, on a busy machine, too.
    monkeypatch.setattr(mask_thread, "FREE_SECONDS", all_seconds / 3)
    monkeypatch.setattr(mask_thread, "PATIENCE_SECONDS", 0.0)
    assert matcher.allowed(list(b"x" * 60_000)) is not None
    assert matcher.allowed(list(b"x" * 60_000 + b">abcdefabcd")) is None
    assert matcher.allowed(list(b"x" * 60_000 + b">abcdefabc")) is not None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_gpu_blocks": 40, "preemption": "recompute"},
        {"num_gpu_blocks": 40, "preemption": "swap", "host_tier_gb": 0.01},
        {"num_speculative_tokens": 4, "adaptive_drafts": False, "ngram_min": 1},
    ],
    ids=str,
)
def test_no_setting_changes_a_token(alone: list[list[int]], settings: dict[str, Any]) -> None:
    llm = make(**settings)
    params = [each for each in PARAMS for _ in PROMPTS]
    completions = llm.generate(PROMPTS * len(PARAMS), params)
    assert [completion.token_ids for completion in completions] == alone
    assert llm.engine.num_failed_steps == 0
    if settings.get("num_gpu_blocks") == 40:
        assert llm.engine.load().num_preemptions > 0
    if "num_speculative_tokens" in settings:
        assert num_drafts(llm.engine)[1] > 0


def test_a_grammar_at_its_limits_fails_its_request_alone() -> None:
    llm = make()
    ambiguous = grammar.lark('start: e\ne: "(" e ")" | e e | "a"')
    hopeless = SamplingParams(max_tokens=2000, temperature=0.0, grammar=ambiguous, logit_bias=((ord("a"), 100.0),))
    answers = [llm.engine.add_request([1, 2], params) for params in (hopeless, PARAMS[0])]
    errors, texts = {}, {}
    while llm.engine.has_work():
        for output in llm.engine.step().outputs:
            if output.error is not None:
                errors[output.request.request_id] = output.error
            elif output.finish_reason is not None:
                texts[output.request.request_id] = llm.tokenizer.decode(output.request.output_token_ids)
    assert list(errors) == [answers[0].request_id]
    assert errors[answers[0].request_id].startswith("the grammar is too complex: ")
    check_person(texts[answers[1].request_id])


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_nothing_comes_after_a_complete_answer(ignore_eos: bool) -> None:
    params = SamplingParams(
        max_tokens=50, min_tokens=40, temperature=0.0, grammar=grammar.choice(["yes"]), ignore_eos=ignore_eos
    )
    [completion] = make().generate("a", params)
    assert completion.text == "yes"
    assert completion.finish_reason == "stop"


def test_allowed_tokens_and_grammars_together() -> None:
    both = SamplingParams(
        max_tokens=50, temperature=0.0, grammar=grammar.choice(["yes", "no"]), allowed_token_ids=tuple(b"noz")
    )
    assert make().generate("a", both)[0].text == "no"


@pytest.mark.parametrize("text", ["regex:(", "json_schema:{", "nothing"])
def test_a_grammar_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="grammar"):
        make().generate("a", SamplingParams(grammar=text))


def test_others_go_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the request is admitted but has no row; then it gets its answer."""
    llm = make()
    compile_it, compiled = Grammars._compile, threading.Event()

    def slowly(grammars: Grammars, text: str) -> LLMatcher:
        assert compiled.wait(30.0)
        return compile_it(grammars, text)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    held = llm.engine.add_request([1, 2], SamplingParams(max_tokens=9, grammar=grammar.choice(["slow"])))
    plain = llm.engine.add_request([1, 2], SamplingParams(max_tokens=9, ignore_eos=True))
    while len(plain.output_token_ids) < 9:
        llm.engine.step()
    assert not held.output_token_ids
    assert held.num_computed_tokens == 0
    compiled.set()
    finish(llm.engine)
    assert llm.tokenizer.decode(held.output_token_ids) == "slow"
