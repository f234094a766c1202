"""`mini-infer demo --compare`, on the dry-run model: each comparison measures what it claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cli.comparisons import command, on_engines
from cli.comparisons.command import ALL, NAMES, free_cores
from cli.comparisons.on_engines import loaded, pause_beside_prompt
from cli.comparisons.result import Comparison
from cli.comparisons.timing import Stepper, decode_speed, params, random_prompt
from cli.main import main


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.comparisons.timing.MOST_ROUNDS", 1)


@pytest.mark.parametrize(
    ("measure", "num_arms", "told"),
    [
        (on_engines.batching, 2, "8 streams together got "),
        (on_engines.prefix_cache, 2, "tokens were cached."),
        (on_engines.chunked_prefill, 2, "the prompt's first token came after "),
        (on_engines.quantization, 3, "The fastest quantized weights, int"),
        (on_engines.speculation, 2, "drafts were accepted, the tokens were the same."),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_both_are_measured(measure: Callable[[str, int], Comparison], num_arms: int, told: str) -> None:
    comparison = measure("dry-run", 1)
    assert len(comparison.arms) == num_arms
    assert all(arm.value > 0 for arm in comparison.arms)
    assert told in comparison.sentence


def test_only_the_second_prompt_is_cached() -> None:
    with loaded("dry-run") as llm:
        prompt = random_prompt(llm, 64, "seed")
        cached = []
        for _ in range(2):
            stepper = Stepper(llm.engine)
            asked = stepper.add(prompt, params(1))
            stepper.run([asked])
            cached.append(asked.request.num_cached_tokens)
        assert cached == [0, 48]


def test_chunks_are_steps_between_which_streams_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts steps, a prompt in one step pauses nobody for two."""
    steps = 0

    def clock() -> float:
        return float(steps)

    step = Stepper.step

    def counted(self: Stepper) -> None:
        nonlocal steps
        steps += 1
        step(self)

    monkeypatch.setattr("cli.comparisons.timing.time.perf_counter", clock)
    monkeypatch.setattr(Stepper, "step", counted)
    with loaded("dry-run", max_num_batched_tokens=128, max_num_seqs=8) as llm:
        pause, ttft = pause_beside_prompt(llm, "seed")
        num_tokens = len(random_prompt(llm, on_engines.LONG_PROMPT, "x"))
        assert not llm.engine.has_work()
    assert pause == 1e3  # a token of each stream in each step
    assert ttft >= 1e3 * num_tokens / 128


def test_a_speed_counts_tokens_after_all_streams_have_begun() -> None:
    with loaded("dry-run") as llm:
        speed, first = decode_speed(llm.engine, [random_prompt(llm, 32, seed) for seed in range(2)], params(9))
        seconds = first.times[-1] - first.times[0]
    assert len(first.token_ids) == sum(first.counts) == 9
    assert 8 / seconds <= speed <= 2.5 * 8 / seconds


def test_what_cannot_be_shown_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(name: str, _model: str, _num_threads: int) -> Comparison:
        measured.append(name)
        return Comparison(name, "ms", [], "A sentence.")

    monkeypatch.setattr(command, "_measured", measure)
    monkeypatch.setattr(command, "uses_gpu", lambda _device: False)
    monkeypatch.setattr(command, "has_wing", lambda module: module != "engine.speculation")
    assert main(["demo", "--compare"]) == 0
    assert measured == [name for name in NAMES if name not in ("cuda-graphs", "speculation")]
    printed = capsys.readouterr().out
    assert "cuda-graphs: left out, there is no GPU" in printed
    assert "speculation: left out, this installation lacks what it compares" in printed
    measured.clear()
    assert main(["demo", "--compare", "batching"]) == 0
    assert measured == ["batching"]


@pytest.mark.parametrize(
    ("cores", "load", "threads"), [(2, 0.3, 0), (2, 0.6, 1), (2, 8.0, 1), (1, 0.0, 0), (1, 5.0, 0), (16, 4.4, 12)]
)
def test_a_busy_machine_gets_fewer_threads(cores: int, load: float, threads: int) -> None:
    assert free_cores(cores, load) == threads


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--compare", "speed"], "choose batching, prefix-cache"),
        (["--compare", "--url=http://127.0.0.1:1"], "leave out --url"),
        (["--svg=demo.svg"], "add --compare"),
        (["--compare=batching", "--prefill=2"], "leave out --url and flags of serve"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_one_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any) -> Comparison:
        raise AssertionError("measured")

    monkeypatch.setattr(command, "_measured", measure)
    assert main(["demo", *flags]) == 1
    assert told in capsys.readouterr().err
    assert ALL not in NAMES


@pytest.mark.soak
def test_one_worker_and_two_are_clusters_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--compare=disaggregation", "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("one worker", "prefill and decode", "2 running streams paused ", "'s first token came after "):
        assert text in printed
