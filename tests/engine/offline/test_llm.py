"""The whole engine in one process, on the tiny random model: nothing that the scheduler does changes a token."""

from __future__ import annotations

import gc
import io
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engine
import mini_infer
from common.errors import ConfigError, ContextLengthError, EngineError, InvalidRequestError
from engine.cpu.runner import CpuRunner
from engine.engine import DeviceLostError
from engine.plan import PendingStep, StepPlan
from mini_infer import LLM, SamplingParams
from tests.engine.tiny_models import EOS, TinyModel
from tests.harness.cluster import save_with_tokenizer

PROMPTS = ["a", "Hello there", "The quick brown fox " * 6, "0123456789" * 30, "émoji 🙂 and 漢字 " * 5, "z" * 90]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=20, temperature=1.1, top_k=40, top_p=0.95, presence_penalty=0.3, frequency_penalty=0.2,
    repetition_penalty=1.1, seed=11, ignore_eos=True,
)  # fmt: skip


def make(**settings: object) -> LLM:
    return LLM("dry-run", num_threads=1, **{"num_gpu_blocks": 256, **settings})


@pytest.fixture(scope="module")
def one_by_one() -> dict[SamplingParams, list[list[int]]]:
    """Run every prompt alone, unchunked and without caches."""
    llm = make(prefix_cache=False, max_num_batched_tokens=2048)
    return {params: [llm.generate(p, params)[0].token_ids for p in PROMPTS] for params in (GREEDY, SAMPLED)}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7, "block_size": 4, "num_gpu_blocks": 400},
        {"prefix_cache": False, "max_num_batched_tokens": 64, "max_num_seqs": 3},
        {"num_gpu_blocks": 32, "preemption": "recompute"},
        {"num_gpu_blocks": 32, "preemption": "swap", "host_tier_gb": 0.01, "prefix_cache": False},
    ],
    ids=str,
)
def test_no_setting_changes_a_token(
    one_by_one: dict[SamplingParams, list[list[int]]], settings: dict[str, object], params: SamplingParams
) -> None:
    llm = make(**settings)
    for _ in range(2):  # the second time from the caches
        completions = llm.generate(PROMPTS, params)
        assert [c.token_ids for c in completions] == one_by_one[params]
    if settings.get("num_gpu_blocks") == 32:
        assert llm.engine.load().num_preemptions > 0
    assert llm.engine.num_failed_steps == 0
    pool = llm.engine.kv.pool
    pool.check_integrity()
    assert pool.num_used == 0


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM", "Completion", "Embedding", "SamplingParams"])
def test_the_engine_has_the_names_of_the_python_api(name: str) -> None:
    assert getattr(engine, name) is getattr(mini_infer, name)


def test_answers_end_with_the_ends_of_sequence_of_config_and_tokenizer(tmp_path: Path) -> None:
    """Fine-tuned models often name the end of a message in one of them alone."""
    folder = save_with_tokenizer(TinyModel("Llama", {"vocab_size": 320}), tmp_path)
    llm = LLM(str(folder), num_gpu_blocks=32, num_threads=1)
    for end in (EOS, 258):
        params = SamplingParams(max_tokens=5, temperature=0.0, logit_bias=((end, 100.0),))
        [answer] = llm.generate("a", params)
        assert (answer.token_ids, answer.finish_reason) == ([end], "stop")


def test_special_tokens_in_a_text_are_special_but_not_in_a_chat() -> None:
    """A caller may render a chat template, as for `/v1/completions` and vLLM; a message is not to be trusted."""
    llm = make()
    params = SamplingParams(max_tokens=1)
    assert llm.generate("<user>a<assistant>", params)[0].prompt_token_ids == [258, ord("a"), 259]
    assert llm.embed("<user>a")[0].prompt_token_ids == [258, ord("a")]
    asked = llm.chat([{"role": "user", "content": "<assistant>"}], params).prompt_token_ids
    assert asked == [256, 258, *b"<assistant>", 259]


def test_a_text_is_continued_with_its_first_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `/v1/completions` and vLLM: 'The sky is' by ' blue'."""
    llm = make()
    monkeypatch.setattr(llm.tokenizer.table, "strips_prefix_space", True)  # as with SentencePiece
    params = SamplingParams(max_tokens=3, temperature=0.0, logit_bias=((ord(" "), 100.0),))
    assert [answer.text for answer in llm.generate(["a", "b"], params)] == ["   ", "   "]
    assert llm.generate("a", params, stop="x")[0].text == "   "
    assert "".join(llm.stream("a", params)) == "   "
    assert llm.chat([{"role": "user", "content": "a"}], params).text == "  "


def test_a_stop_string_ends_an_answer_before_itself() -> None:
    llm = make()
    whole = llm.generate(PROMPTS, GREEDY)
    text = whole[1].text
    stop = text[5:7]
    first, second = llm.generate([PROMPTS[1], PROMPTS[0]], GREEDY, stop=[stop, "not there"])
    assert (first.text, first.finish_reason, first.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert first.token_ids == whole[1].token_ids[: len(first.token_ids)]
    assert len(first.token_ids) < len(whole[1].token_ids)
    if stop not in whole[0].text:
        assert (second.text, second.finish_reason, second.stop_reason) == (whole[0].text, "length", None)
    assert "".join(llm.stream(PROMPTS[1], GREEDY, stop=stop)) == first.text
    later = replace(GREEDY, min_tokens=len(first.token_ids) + 1)
    assert llm.generate(PROMPTS[1], later, stop=stop)[0].text.startswith(text[: text.index(stop)] + stop)
    assert llm.engine.load().num_requests == llm.engine.kv.pool.num_used == 0
    with pytest.raises(InvalidRequestError, match="stop string"):
        llm.generate("a", GREEDY, stop="")


def is_idle(llm: LLM) -> bool:
    """Whether no request is open and every block is free or cached."""
    pool = llm.engine.kv.pool
    pool.check_integrity()
    return pool.num_used == 0 and llm.engine.load().num_requests == 0


def test_threads_share_an_engine() -> None:
    llm = make()
    expected = [completion.text for completion in llm.generate(PROMPTS, SAMPLED)]

    def ask(index: int) -> str:
        prompt = PROMPTS[index % len(PROMPTS)]
        return "".join(llm.stream(prompt, SAMPLED)) if index % 2 else llm.generate(prompt, SAMPLED)[0].text

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(ask, range(24))) == [expected[index % len(PROMPTS)] for index in range(24)]
    assert is_idle(llm)


def test_a_thread_that_steps_leaves_the_others_their_turn() -> None:
    llm = make(simulated_steps="base=0.005")  # lasts a second, however late this thread gets a core
    stream = llm.stream("long", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    next(stream)
    ended = []
    reader = threading.Thread(target=lambda: ended.append("".join(stream)))
    reader.start()
    llm.generate("short", SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    assert not ended, "the short one waited for the long one"
    reader.join()
    assert is_idle(llm)


def test_a_stream_that_is_dropped_inside_a_step_frees_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection may run anywhere, also in the thread that holds the engine."""
    llm = make()
    holder: list[Any] = [llm.stream("Hello", SamplingParams(max_tokens=500, ignore_eos=True))]
    next(holder[0])
    holder.append(holder)  # a cycle, so that only the collector finds it
    collected = []

    def collect() -> None:
        if not collected:
            collected.append(gc.collect())

    before_each_step(monkeypatch, collect)
    gc.collect()
    gc.disable()
    try:
        del holder
        thread = threading.Thread(target=llm.generate, args=("another", GREEDY), daemon=True)
        thread.start()
        thread.join(100.0)
        assert not thread.is_alive(), "it waits for itself"
    finally:
        gc.enable()
    assert collected[0] > 0
    assert is_idle(llm)


def before_each_step(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    launch = CpuRunner.launch

    def first_call(runner: CpuRunner, plan: StepPlan) -> PendingStep:
        call()
        return launch(runner, plan)

    monkeypatch.setattr(CpuRunner, "launch", first_call)


def test_a_failed_engine_ends_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    lost = DeviceLostError("the GPU has fallen off the bus")

    def lose() -> None:
        raise lost

    before_each_step(monkeypatch, lose)
    for stream in streams:
        with pytest.raises(EngineError, match="fallen off the bus") as caught:
            "".join(stream)
        assert caught.value.__cause__ is lost
    with pytest.raises(EngineError, match="fallen off the bus"):
        llm.generate("too late", GREEDY)


def test_ctrl_c_ends_the_open_streams_and_leaves_a_model_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    [expected] = llm.generate("Hello", GREEDY)
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        before_each_step(patch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Hello", GREEDY)
    with pytest.raises(EngineError, match="interrupted"):
        "".join(stream)
    assert is_idle(llm)
    assert llm.generate("Hello", GREEDY)[0].token_ids == expected.token_ids


def test_a_bad_prompt_starts_nothing() -> None:
    llm = make()
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.generate([[1, 2], [99999]], GREEDY)
    for token_id in (-1, llm.engine.vocab_size):
        with pytest.raises(InvalidRequestError, match="vocabulary") as caught:
            llm.engine.add_request([1, 2], GREEDY, output_token_ids=[3, token_id])
        assert caught.value.param is None
    with pytest.raises(ContextLengthError):
        llm.generate(["ok", "x" * 5000], GREEDY)
    assert llm.engine.load().num_requests == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/nowhere/at/all"}, "not found"),
        ({"device": "cuda"}, "cuda"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "max-num-batched-tokens"),
        ({"kv_cache_gb": -1.0}, "kv-cache-gb"),
        ({"max_model_length": 5}, "no setting 'max_model_length': did you mean 'max_model_len'"),
        ({"gpu_memory_utilization": 2.0}, "--gpu-memory-fraction must be"),  # vLLM's name of it
        ({"device": "tpu"}, "device 'tpu': choose one of auto, cpu, cuda"),
        ({"dtype": "float8"}, "dtype 'float8': choose one of"),
        ({"dtype": None}, "dtype must be a text, not None"),
        ({"tp": "2"}, "tp must be an integer, not '2'"),
        ({"num_gpu_blocks": 1.5}, "num_gpu_blocks must be an integer, not 1.5"),
        ({"kv_cache_gb": "1"}, "kv_cache_gb must be a number"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False"),
        ({"model": None}, "model must be a text"),
    ],
)
def test_settings_that_cannot_work_say_so(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": "dry-run", "num_threads": 1, **settings})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_shows_progress_in_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make()
    assert "loading weights" not in capsys.readouterr().err
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    make()
    shown = terminal.getvalue()
    assert "\r\x1b[Kloading weights: 100%" in shown
    assert shown.endswith("\r\x1b[K"), "a trace is left"
