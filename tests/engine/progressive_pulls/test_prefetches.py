"""KV of prompts that a peer is still computing: what is fetched, which requests wait, and which are not disturbed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.progressive_pulls.prefetches import MAX_PREFETCHES
from engine.request import RequestId, RequestStatus, SamplingParams
from tests.engine.fakes import expected_tokens
from tests.engine.scheduling.engines import BLOCK, SMALL_ENGINES, assert_quiet, make_engine, run_all
from tests.engine.scheduling.peer import PROMPT, finish, load_rest, make_peer


@pytest.mark.parametrize("overlap", [False, True])
def test_only_the_rest_is_loaded(overlap: bool) -> None:
    peer = make_peer(overlap=overlap)
    peer.prefetch(PROMPT, 0, 2)
    peer.prefetch(PROMPT, 2, 4)
    pool = peer.engine.kv.pool
    assert (pool.num_used, pool.num_cached) == (0, 4)  # nobody's, until the request comes
    request = peer.submit(PROMPT)
    load_rest(peer, request, [4, 5])
    assert request.num_cached_tokens == request.num_prefetched_tokens == 4 * BLOCK
    again = peer.submit(PROMPT)
    run_all(peer.engine)
    assert (again.num_cached_tokens, again.num_prefetched_tokens) == (5 * BLOCK, 0)  # for the first request


@pytest.mark.parametrize("ok", [True, False])
def test_a_request_waits_for_what_is_on_its_way(ok: bool) -> None:
    peer = make_peer()
    peer.offer(PROMPT, 0, 4)
    peer.step()
    request = peer.submit(PROMPT)
    assert request.status is RequestStatus.AWAITING
    assert not peer.engine.has_work()
    assert peer.engine.load().num_loading == 1
    peer.step()
    assert peer.loads == []
    [part] = peer.prefetches
    peer.finish(part, ok)
    load_rest(peer, request, [4, 5] if ok else [0, 1, 2, 3, 4, 5])


def test_a_part_and_its_request_may_come_in_one_step() -> None:
    peer = make_peer()
    peer.offer(PROMPT, 0, 4)
    request = peer.submit(PROMPT)
    peer.step()
    [part] = peer.prefetches
    peer.finish(part)
    load_rest(peer, request, [4, 5])


def test_requests_that_bring_no_kv_wait_for_nothing() -> None:
    peer = make_peer()
    peer.offer(PROMPT, 0, 4)
    peer.step()
    request = peer.engine.add_request(PROMPT, SamplingParams(max_tokens=5))
    run_all(peer.engine)
    [part] = peer.prefetches
    peer.finish(part)  # its keys are others' already
    finish(peer, request)


def test_an_awaiting_request_can_be_cancelled() -> None:
    peer = make_peer()
    peer.offer(PROMPT, 0, 4)
    peer.step()
    request = peer.submit(PROMPT)
    assert peer.engine.abort(request.request_id) is request
    assert peer.engine.abort(request.request_id) is None
    [part] = peer.prefetches
    peer.finish(part)
    assert_quiet(peer.engine)
    assert not peer.engine.has_work()


def test_what_is_cached_is_not_fetched_again() -> None:
    peer = make_peer()
    peer.prefetch(PROMPT, 0, 2)
    peer.offer(PROMPT, 0, 2)
    peer.offer(PROMPT, 1, 4)
    peer.step()
    assert peer.num_skipped == 1
    [job] = peer.prefetches
    assert job.positions == [1, 2]
    peer.finish(job)
    assert_quiet(peer.engine)


def test_parts_of_equal_prompts_are_fetched_once() -> None:
    peer = make_peer()
    for _ in range(2):
        peer.offer(PROMPT, 0, 3)
    peer.offer(PROMPT, 3, 4)
    peer.step()
    assert [len(job.positions) for job in peer.prefetches] == [3, 1]
    assert peer.num_skipped == 1


@pytest.mark.parametrize("ok", [True, False])
def test_a_load_fills_the_gap_that_a_part_has_left(ok: bool) -> None:
    peer = make_peer()
    peer.prefetch(PROMPT, 0, 1)
    peer.prefetch(PROMPT, 3, 5)
    request = peer.submit(PROMPT)
    peer.step()
    [job] = peer.loads
    assert job.positions == [1, 2, 5]
    assert request.num_cached_tokens == 3 * BLOCK
    other = peer.submit(PROMPT)  # shares them
    peer.step()
    peer.finish(job, ok)
    peer.finish(peer.loads[0])
    run_all(peer.engine)
    for each in (request, other):
        assert each.output_token_ids == expected_tokens(PROMPT, 5)
    assert_quiet(peer.engine)


def test_without_a_prefix_cache_nothing_is_fetched() -> None:
    peer = make_peer(prefix_cache=False)
    peer.offer(PROMPT, 0, 4)
    request = peer.submit(PROMPT)
    peer.step()
    assert (peer.prefetches, peer.num_skipped) == ([], 1)
    load_rest(peer, request, [0, 1, 2, 3, 4, 5])


def test_few_are_under_way_at_once() -> None:
    peer = make_peer()
    for first in range(MAX_PREFETCHES + 1):
        peer.offer([100 * first + token for token in range(BLOCK)], 0, 1)
    peer.step()
    assert (len(peer.prefetches), peer.num_skipped) == (MAX_PREFETCHES, 1)
    peer.finish(peer.prefetches[0])
    peer.offer(PROMPT, 0, 1)
    peer.step()
    assert len(peer.prefetches) == MAX_PREFETCHES


def test_blocks_that_running_requests_need_are_left() -> None:
    """A prompt of four blocks is being computed in chunks of one; it and its next token need five of eight."""
    peer = make_peer(8, budget=BLOCK)
    request = peer.engine.add_request(list(range(50, 50 + 4 * BLOCK)), SamplingParams(max_tokens=3))
    peer.step()
    peer.offer(PROMPT, 0, 4)
    peer.step()
    assert (peer.prefetches, peer.num_skipped) == ([], 1)
    peer.offer(PROMPT, 0, 3)
    peer.step()
    assert len(peer.prefetches) == 1
    finished = [token for _ in range(8) for token in peer.step().get(request.request_id, [])]
    assert finished == expected_tokens(request.prompt_token_ids, 3)
    assert peer.engine.load().num_preemptions == 0


@pytest.mark.wing("kvstore.tier")
def test_what_a_prefetch_evicts_goes_to_the_host_tier_first() -> None:
    peer = make_peer(8, host_slots=16)
    first = list(range(100, 100 + 6 * BLOCK))
    peer.engine.add_request(first, SamplingParams(max_tokens=1))
    run_all(peer.engine)
    peer.prefetch(PROMPT, 0, 5)
    again = peer.engine.add_request(first, SamplingParams(max_tokens=3))
    finish(peer, again, first)
    assert again.num_cached_tokens == 5 * BLOCK  # its last token is always computed


@pytest.mark.wing("kvstore.tier")
def test_the_load_behind_a_part_has_nothing_to_evict() -> None:
    peer = make_peer(10, host_slots=16)
    peer.engine.add_request(list(range(100, 100 + 9 * BLOCK)), SamplingParams(max_tokens=1))
    run_all(peer.engine)
    pool = peer.engine.kv.pool
    assert (pool.num_free, pool.num_cached) == (1, 9)
    peer.offer(PROMPT, 0, 3)
    peer.step()
    assert peer.num_copies_out == 2 + 3
    assert (pool.num_free, pool.num_cached) == (3, 4)
    peer.finish(peer.prefetches[0])
    request = peer.submit(PROMPT)
    peer.step()
    assert peer.num_copies_out == 0
    [job] = peer.loads
    assert job.positions == [3, 4, 5]
    peer.finish(job)
    finish(peer, request)


def test_nothing_is_fetched_while_somebody_waits() -> None:
    peer = make_peer(max_num_seqs=1)
    peer.engine.add_request([1, 2, 3], SamplingParams(max_tokens=8))
    peer.engine.add_request([4, 5, 6], SamplingParams(max_tokens=2))
    peer.offer(PROMPT, 0, 1)
    peer.step()
    assert (peer.prefetches, peer.num_skipped) == ([], 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_chunk_is_reported_when_its_step_has_ended(overlap: bool) -> None:
    engine, _ = make_engine(budget=8, overlap=overlap)
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=1), prefill_only=True)
    chunks = []
    for num_steps in (1, 2, 3, 4):
        outcome = engine.step()
        chunks += [(num_steps, chunk.num_tokens) for chunk in outcome.prompt_chunks]
        if outcome.outputs:
            break
    assert chunks == [(1 + overlap, 8), (2 + overlap, 16)]  # the last one's end is the request's
    engine.kv.pool.release(engine.kv.detach(request, request.num_known_tokens - 1))
    engine.add_request([*PROMPT, 99], SamplingParams(max_tokens=1))  # for no peer
    while engine.has_work():
        assert engine.step().prompt_chunks == []
    assert_quiet(engine)


@pytest.mark.wing("kvstore.tier")
@settings(max_examples=75)
@given(
    data=st.data(),
    num_blocks=st.integers(10, 24),
    options=st.fixed_dictionaries({**SMALL_ENGINES, "overlap": st.booleans()}),
)
def test_any_order_of_events_keeps_every_token(data: st.DataObject, num_blocks: int, options: dict[str, Any]) -> None:
    """Parts, requests, ends of pulls, failures and aborts in any order: tokens are right, no block is lost."""
    peer = make_peer(**{**options, "num_blocks": num_blocks}, max_num_seqs=3, is_late=True)
    live: dict[RequestId, tuple[list[int], int]] = {}
    tokens: dict[str, list[int]] = {}

    def step() -> None:
        for name, new in peer.step().items():
            tokens.setdefault(name, []).extend(new)

    def finish_one() -> None:
        ok = data.draw(st.sampled_from([True, True, False]))
        if peer.prefetches and (not peer.loads or data.draw(st.booleans())):
            peer.finish(data.draw(st.sampled_from(peer.prefetches)), ok)
        elif peer.loads:
            peer.finish(data.draw(st.sampled_from(peer.loads)), ok)

    events = ["offer", "offer", "submit", "local", "step", "step", "step", "finish", "finish", "abort"]
    for _ in range(data.draw(st.integers(1, 50))):
        event = data.draw(st.sampled_from(events))
        family = data.draw(st.integers(0, 2))
        prompt = [family] * data.draw(st.integers(1, 20)) + [data.draw(st.integers(3, 5))]
        limit = data.draw(st.integers(2, 8))
        if event == "offer" and len(prompt) >= BLOCK:
            last = data.draw(st.integers(1, len(prompt) // BLOCK))
            peer.offer(prompt, data.draw(st.integers(0, last - 1)), last)
        elif event == "submit":
            live[peer.submit(prompt, limit).request_id] = (prompt, limit)
        elif event == "local":
            request = peer.engine.add_request(prompt, SamplingParams(max_tokens=limit))
            live[request.request_id] = (prompt, limit)
        elif event == "finish":
            finish_one()
        elif event == "abort" and live:
            name = data.draw(st.sampled_from(sorted(live)))
            peer.engine.abort(name)
            del live[name]
        else:
            step()
        peer.engine.kv.pool.check_integrity()
    for _ in range(2000):
        step()
        finish_one()
        if not (peer.engine.has_work() or peer.loads or peer.prefetches):
            break
    for name, (prompt, limit) in live.items():
        answer = expected_tokens(prompt, limit)
        assert tokens[name] in (answer, answer[1:]), "the first token comes with the KV"
    assert_quiet(peer.engine)
