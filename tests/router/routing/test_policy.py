"""The choice of workers is a pure function of the router's views."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from common.errors import UnavailableError
from common.step_times import StepCost
from kvstore.types import WorkerId
from router.routing.policy import choose
from router.routing.views import RequestView, WorkerView

P0, P1, D0, D1 = (WorkerId(name) for name in ("p0", "p1", "d0", "d1"))


def view(worker: WorkerId, step: float = 0.01, prompt_token: float = 0.001, **fields: Any) -> WorkerView:
    return WorkerView(worker, step=StepCost(base=step, prompt_token=prompt_token), **fields)


def request(num_tokens: int = 1000, cached: dict[WorkerId, int] | None = None, **fields: Any) -> RequestView:
    return RequestView(num_tokens, cached or {}, **fields)


def test_long_prompts_go_to_prefill_and_short_ones_stay() -> None:
    workers = [view(P0)], [view(D0)]
    assert choose("cost", request(1000), *workers, 64).chosen.prefill == P0
    assert choose("cost", request(64), *workers, 64).chosen.prefill is None
    assert choose("cost", request(64), *workers, 0).chosen.prefill == P0
    assert choose("cost", request(1000, {D0: 992}), *workers, 64).chosen.prefill is None


def test_without_prefill_workers_decode_computes_and_without_decode_nobody() -> None:
    assert choose("cost", request(1000), [], [view(D0)], 0).chosen.prefill is None
    with pytest.raises(UnavailableError):
        choose("cost", request(), [view(P0)], [], 64)


def test_the_cache_and_the_queue_decide() -> None:
    decode = [view(D0)]
    cached = request(1000, {P1: 800})
    assert choose("cost", cached, [view(P0), view(P1)], decode, 64).chosen.prefill == P1
    busy = [view(P0), view(P1, queued_prefill_tokens=5000)]
    assert choose("cost", cached, busy, decode, 64).chosen.prefill == P0


def test_decode_load_speed_and_memory_decide() -> None:
    for worse in ({"num_running": 40}, {"step": 0.03}, {"kv_used_share": 0.99}):
        decision = choose("cost", request(50), [], [view(D0, **worse), view(D1)], 64)
        assert decision.chosen.decode == D1, worse


def test_equal_workers_share_by_draw_and_a_fuller_cache_breaks_the_tie() -> None:
    decode = [view(D0), view(D1)]
    chosen = Counter(choose("cost", request(50, draw=i / 100), [], decode, 64).chosen.decode for i in range(100))
    assert chosen == {D0: 50, D1: 50}
    assert choose("cost", request(50, {D1: 16}), [], decode, 64).chosen.decode == D1


def test_a_worker_that_was_slow_is_tried_again_while_others_work() -> None:
    busy = [view(D0, num_running=3), view(P0, num_running=3)]
    slow = view(D1, step=0.2, prompt_token=0.01)
    assert choose("cost", request(50), [], [*busy, slow], 64).chosen.decode != D1
    forgotten = replace(slow, is_forgotten=True)
    assert choose("cost", request(50), [], [*busy, forgotten], 64).chosen.decode == D1
    everybody = [replace(worker, is_forgotten=True) for worker in (*busy, slow)]  # only measured numbers are known
    assert choose("cost", request(50), [], everybody, 64).chosen.decode != D1


def test_few_streams_spread_over_workers_that_are_about_equally_fast() -> None:
    """Measured step times of equal machines differ by a few percent, which must not send everything to one."""
    running = {D0: 0, D1: 0}
    for number in range(8):
        decode = [view(D0, num_running=running[D0], step=0.0070), view(D1, num_running=running[D1], step=0.0075)]
        running[choose("cost", request(50, draw=number / 8), [], decode, 64).chosen.decode] += 1
    assert running == {D0: 4, D1: 4}


def test_what_a_prefix_saves_is_not_lost_in_the_time_of_the_answer() -> None:
    """A tenth of a long answer's time, the noise of measured steps, is more than any prompt takes."""
    decode = [view(D0, num_running=3), view(D1)]
    chosen = choose("cost", request(500, {D0: 480}, expected_tokens=1000.0), [], decode, 64).chosen
    assert chosen.decode == D0
    prefill = [view(P0, num_running=1), view(P1)]
    chosen = choose("cost", request(500, {P0: 480}, expected_tokens=1000.0), prefill, decode, 0).chosen
    assert chosen.prefill == P0


def test_a_prompt_lately_computed_does_not_send_its_next_turn_elsewhere() -> None:
    decode = [view(D0, prompt_tokens_per_second=150.0, prompts_per_second=0.3), view(D1)]
    assert choose("cost", request(600, {D0: 496}), [], decode, 64).chosen.decode == D0


def test_requests_go_where_their_adapter_is() -> None:
    """Unless the queue there takes longer than reading the adapter elsewhere."""
    prefill, lacking = [view(P0), view(P1)], frozenset([P0, D1])
    decision = choose("cost", request(100, lacking_adapter=lacking), prefill, [view(D0), view(D1)], 64)
    assert (decision.chosen.prefill, decision.chosen.decode) == (P1, D0)
    terms = {(each.prefill, each.decode): each.terms["adapter"] for each in decision.candidates}
    assert terms == {(P0, D0): 0.05, (P0, D1): 0.1, (P1, D0): 0.0, (P1, D1): 0.05}
    busy = [view(P0), view(P1, queued_prefill_tokens=50_000)]
    assert choose("cost", request(100, lacking_adapter=lacking), busy, [view(D0)], 64).chosen.prefill == P0


def test_the_last_token_is_always_computed() -> None:
    decision = choose("cost", request(64, {D0: 64}), [], [view(D0)], 64)
    assert decision.chosen.cached_tokens == 63
    assert decision.chosen.terms["compute"] > 0


def test_unmeasured_workers_take_the_mean_of_the_others() -> None:
    decision = choose("cost", request(), [view(P0), WorkerView(P1)], [view(D0)], 64)
    first, second = decision.candidates
    assert first.terms["compute"] == second.terms["compute"]
