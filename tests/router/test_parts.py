"""Small parts of the router: breaker, rates, journal, handshake, settings, best_of."""

from __future__ import annotations

import pytest

from common.errors import ConfigError, HandshakeError
from kvstore.pool.block_hash import HASH_VERSION
from protos import types_pb2 as pb
from router.api.results import ChoiceResult, best_results
from router.api.sampling import for_choice
from router.cluster.breaker import OPEN_SECONDS, Breaker
from router.cluster.handshake import check_worker
from router.cluster.rates import WorkerRates
from router.config import RouterConfig
from router.journal import Journal


def test_breaker_opens_after_three_failures_close_together() -> None:
    breaker = Breaker()
    for time in (0.0, 10.0, 20.0, 21.0):
        breaker.record_failure(time)
        assert not breaker.is_open(time)
    breaker.record_failure(22.0)
    assert breaker.is_open(22.0)
    assert not breaker.is_open(22.0 + OPEN_SECONDS)
    breaker.record_failure(30.0)
    breaker.record_failure(30.1)
    breaker.record_success()
    breaker.record_failure(30.2)
    assert not breaker.is_open(30.2)


def test_rates_follow_what_was_measured() -> None:
    rates = WorkerRates()
    rates.observe_times(1000, pb.RequestTimes(prefill_seconds=0.5, num_cached_tokens=500), now=100.0)
    assert rates.prefill_tokens_per_second == 1000
    for number in range(30):
        rates.observe_times(1000, pb.RequestTimes(prefill_seconds=0.25, num_cached_tokens=500), now=101.0 + number)
    assert rates.prefill_tokens_per_second == pytest.approx(2000, rel=0.01)
    rates.observe_times(
        1000, pb.RequestTimes(prefill_seconds=9, num_cached_tokens=999), now=200.0
    )  # too short to tell
    assert rates.prefill_tokens_per_second == pytest.approx(2000, rel=0.01)
    rates.observe_times(100, pb.RequestTimes(kv_pull_seconds=0.1, num_pulled_tokens=100), now=200.0)
    assert rates.pull_tokens_per_second == pytest.approx(1000)
    rates.observe_load(pb.LoadReport(step_seconds=0.5, step_decode_tokens=1, step_prefill_tokens=100))
    assert rates.step_seconds == 0
    rates.observe_load(pb.LoadReport(step_seconds=0.01, step_decode_tokens=4))
    assert rates.step_seconds == 0.01


def test_prompts_of_the_same_steps_share_their_time() -> None:
    rates = WorkerRates()
    for step in range(30):
        for _ in range(8):  # 8 prompts of 100 tokens in each step of 0.1 s
            rates.observe_times(100, pb.RequestTimes(prefill_seconds=0.1), now=100.0 + step * 0.1)
    assert rates.prefill_tokens_per_second == pytest.approx(8000, rel=0.2)


def test_journal_replays_tokens_under_a_new_name_and_prompt_logprobs_once() -> None:
    sampling = pb.SamplingParams(max_tokens=9, seed=3, prompt_logprobs=1)
    journal = Journal("r-0", [1, 2], sampling, deadline=10.0, arrival=0.0)
    first = journal.next_submit(1.0)
    assert first.sampling.HasField("prompt_logprobs")
    assert first.deadline_seconds == 9.0
    journal.output_token_ids += [7, 8]
    second = journal.next_submit(4.0)
    assert (list(second.prompt_token_ids), list(second.output_token_ids)) == ([1, 2], [7, 8])
    assert first.request_id != second.request_id
    assert not second.sampling.HasField("prompt_logprobs")
    assert (second.sampling.max_tokens, second.sampling.seed) == (9, 3)
    assert journal.next_submit(11.0).deadline_seconds > 0  # 0 would mean none


def test_choices_get_consecutive_seeds_that_wrap() -> None:
    params = pb.SamplingParams(seed=(1 << 64) - 1)
    assert for_choice(params, 0) is params
    assert for_choice(params, 2).seed == 1
    assert params.seed == (1 << 64) - 1


def worker(**fields: object) -> pb.WorkerInfo:
    facts = {
        "worker_id": "w", "role": "decode", "tokenizer_hash": "t", "hash_version": HASH_VERSION, "block_size": 16,
        "vocab_size": 10, "max_model_len": 100, "model_fingerprint": "f", "kv_dtype": "float32", "kv_shape": [1, 2],
    }  # fmt: skip
    return pb.WorkerInfo(**{**facts, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "prefill"}, "listed under --decode"),
        ({"tokenizer_hash": "x"}, "another tokenizer"),
        ({"hash_version": HASH_VERSION + 1}, "block keys by version"),
        ({"block_size": 0}, "impossible sizes"),
        ({"block_size": 32}, "block_size differs: w has '32', other has '16': .*--block-size"),
        ({"model_fingerprint": "g"}, "model_fingerprint differs"),
        ({"kv_dtype": "float16"}, "kv_dtype differs"),
        ({"kv_shape": [1, 3]}, "shape of KV blocks differs"),
    ],
)
def test_handshake_says_what_differs(change: dict[str, object], message: str) -> None:
    check_worker(worker(), "decode", "t", [worker(worker_id="other")])
    with pytest.raises(HandshakeError, match=message):
        check_worker(worker(**change), "decode", "t", [worker(worker_id="other")])


@pytest.mark.parametrize(
    "fields",
    [
        {"decode": ""},
        {"decode": "host"},
        {"decode": "host:0"},
        {"decode": "host:99999"},
        {"decode": ":80"},
        {"decode": "a:1", "prefill": "b:x"},
        {"decode": "a:1", "port": -1},
        {"decode": "a:1", "max_queue": 0},
        {"decode": "a:1", "max_retries": -1},
        {"decode": "a:1", "request_timeout_seconds": 0.0},
    ],
)
def test_settings_that_cannot_work(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RouterConfig(**fields)  # type: ignore[arg-type]


def test_addresses() -> None:
    config = RouterConfig(decode="a:1, [::1]:2 ,b.c:3,")
    assert config.addresses("decode") == [("a", 1), ("::1", 2), ("b.c", 3)]
    assert config.addresses("prefill") == []


def test_best_of_picks_per_prompt_and_numbers_anew() -> None:
    def result(index: int, prompt: int, logprob: float) -> ChoiceResult:
        return ChoiceResult(index, prompt, logprobs=[pb.TokenLogprobs(logprob=logprob)])

    results = [result(0, 0, -3), result(1, 0, -1), result(2, 1, -1), result(3, 1, -2)]
    best = best_results(results, 1)
    assert [(item.index, item.prompt_index, item.logprobs[0].logprob) for item in best] == [(0, 0, -1), (1, 1, -1)]


def test_a_choice_whose_time_was_over_before_its_first_token_is_not_the_best() -> None:
    results = [ChoiceResult(0), ChoiceResult(1, logprobs=[pb.TokenLogprobs(logprob=-5)])]
    (best,) = best_results(results, 1)
    assert best.logprobs
