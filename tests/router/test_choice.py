"""A choice from its first leg to its end, pushed by hand: no network, no clock to wait for."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import DeadlineExceededError, EngineError, MiniInferError, OverloadedError, UnavailableError
from protos import types_pb2 as pb
from router.api.text import Update
from router.choice import State
from tests.harness.waiting import until
from tests.router.pushed import HANDLE, Router, delta_of

GRAMMARS_OF = {"begun": "regex:.*", "plain": "", "suspect": "regex:.*"}


@pytest.mark.parametrize("num_parts", [0, 2])
async def test_a_prompt_and_its_parts_go_on_to_the_next_worker(num_parts: int) -> None:
    router = Router(prefill=1)
    (prefill,), (decode,) = router.prefill, router.decode
    request, sink = router.request()
    (choice,) = request.choices
    offers = [prefill.offers() for _ in range(num_parts)]
    assert (choice.state, sink.updates) == (State.PREFILL, [])
    assert prefill.link.num_requests == 1  # it is still computing
    assert decode.link.num_requests == 1  # it will come there
    assert decode.prefetches == offers
    assert decode.link.num_open == len(decode.submits) == 0
    prefill.prefilled("H")
    assert (choice.state, decode.link.num_expected) == (State.DECODE, 0)
    assert decode.submits[0].kv_handle == HANDLE
    assert bytes(decode.submits[0].output_token_ids) == b"H"
    decode.says("i")
    assert sink.text() == "Hi"  # nothing had to run in between
    decode.says("!", finish_reason=pb.FINISH_REASON_LENGTH)
    assert (choice.state, sink.ends()) == (State.DONE, [(0, "length", None)])
    assert not [*prefill.cancels, *decode.cancels, *prefill.releases]
    assert router.is_quiet()


async def test_a_draining_worker_hears_that_this_is_known_and_gets_no_more_parts() -> None:
    router = Router(prefill=1)
    (prefill,), (decode,) = router.prefill, router.decode
    request, _ = router.request()
    offer = prefill.offers()
    for _ in range(2):
        decode.link.apply(pb.StepReport(load=pb.LoadReport(draining=True, num_drain_changes=1)))
    assert [command.drain_noted for command in decode.commands if command.HasField("drain_noted")] == [
        pb.DrainNoted(num_drain_changes=1)
    ]
    prefill.offers()
    assert decode.prefetches == [offer]
    assert prefill.releases == ["part"]
    request.close()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_parts_that_nobody_will_read_are_released(is_lost: bool) -> None:
    """The decode worker is lost, or the client leaves, while the prompt is computed."""
    router = Router(prefill=1)
    (prefill,), (decode,) = router.prefill, router.decode
    request, _ = router.request()
    offer = prefill.offers()
    if is_lost:
        decode.link.lost("killed")
    else:
        request.close()
    prefill.offers()
    assert decode.prefetches == [offer]
    assert prefill.releases == ["part"]
    if is_lost:
        request.close()
    assert router.is_quiet()


@pytest.mark.parametrize("how", ["lost", "back", "draining", "refused"])
async def test_a_choice_is_not_bound_to_the_worker_that_got_parts_of_its_prompt(how: str) -> None:
    router = Router(prefill=1, decode=2)
    (prefill,) = router.prefill
    _, sink = router.request()
    prefill.offers()
    decode, other = sorted(router.decode, key=lambda worker: not worker.prefetches)
    if how in ("lost", "back"):
        decode.link.lost("killed")
    if how == "back":
        decode.come_back()
    elif how == "draining":
        decode.link.apply(pb.StepReport(load=pb.LoadReport(draining=True)))
    prefill.prefilled("H")
    if how == "refused":
        decode.fails(pb.FAILURE_CODE_UNAVAILABLE)
    goes_on = decode if how == "back" else other
    assert goes_on.submits[-1].kv_handle == HANDLE
    goes_on.says("i", finish_reason=pb.FINISH_REASON_STOP)
    assert sink.text() == "Hi"
    assert b'placements_total{model_name="dry-run",placement="local"} 0.0' in router.metrics.render()  # nor twice
    assert not [*prefill.releases, *decode.cancels]
    assert router.is_quiet()


async def test_a_worker_that_failed_a_choice_gets_it_last_when_the_chosen_one_goes() -> None:
    router = Router(prefill=1, decode=3)
    (prefill,) = router.prefill
    prefill.link.lost("not there yet")
    _, sink = router.request()
    (failed,) = [worker for worker in router.decode if worker.submits]
    prefill.come_back()
    failed.fails(pb.FAILURE_CODE_UNAVAILABLE)
    (chosen,) = [worker for worker in router.decode if worker.link.num_expected]
    (other,) = [worker for worker in router.decode if worker not in (failed, chosen)]
    other.link.apply(pb.StepReport(load=pb.LoadReport(num_running=1)))  # more than the one that failed has
    chosen.link.lost("killed")
    prefill.prefilled("H")
    assert (len(failed.submits), len(other.submits)) == (1, 1)
    other.says("i", finish_reason=pb.FINISH_REASON_STOP)
    assert sink.text() == "Hi"
    assert router.is_quiet()


@pytest.mark.parametrize("end", ["stop", "failed", "lost"])
async def test_parts_of_a_prompt_that_ends_on_the_prefill_worker_open_no_leg(end: str) -> None:
    """The prompt ends with its first token or fails, or its worker dies."""
    router = Router(prefill=1, decode=2)
    (prefill,) = router.prefill
    _, sink = router.request()
    prefill.offers()
    if end == "stop":
        prefill.says("H", finish_reason=pb.FINISH_REASON_STOP)
    elif end == "failed":
        prefill.fails(pb.FAILURE_CODE_INTERNAL)
    else:
        prefill.link.lost("killed")
    again = [worker for worker in router.decode if worker.submits]
    assert len(again) == (end != "stop")  # some decode worker computes the prompt
    for worker in again:
        assert not worker.submits[0].HasField("kv_handle")
        worker.says("H", finish_reason=pb.FINISH_REASON_STOP)
    assert sink.text() == "H"
    assert router.is_quiet()


@pytest.mark.wing("router.stop_strings")
@pytest.mark.parametrize(
    ("text", "stop", "num_before", "shown"),
    [
        ("one two three four", "thr", 9, "one two "),  # the worker is lost between "t" and "hr"
        ("one two three four", "!", 9, "one two three four"),
        ("a 😀 b", "zz", 3, "a 😀 b"),  # in the middle of a character
        ("漢字", "字", 4, "漢"),
    ],
)
async def test_text_goes_on_across_a_migration(text: str, stop: str, num_before: int, shown: str) -> None:
    router = Router(decode=2)
    _, sink = router.request(stops=(stop,))
    first, second = sorted(router.decode, key=lambda worker: not worker.submits)
    data = text.encode()
    delta = pb.TokenDelta(request_id=first.submits[0].request_id, token_ids=data[:num_before])
    first.link.apply(pb.StepReport(deltas=[delta]))
    first.link.lost("killed")
    (resumed,) = second.submits
    assert bytes(resumed.output_token_ids) == data[:num_before]
    assert resumed.request_id != first.submits[0].request_id
    delta = pb.TokenDelta(request_id=resumed.request_id, token_ids=data[num_before:])
    delta.finish_reason = pb.FINISH_REASON_STOP
    second.link.apply(pb.StepReport(deltas=[delta]))
    assert sink.text() == shown
    assert [reason for _, reason, _ in sink.ends()] == ["stop"]
    assert b'mini_infer_migrations_total{model_name="dry-run"} 1.0' in router.metrics.render()
    assert router.is_quiet()


async def test_what_a_closed_leg_still_says_reaches_nobody_and_its_kv_is_released() -> None:
    router = Router(prefill=1)
    request, sink = router.request()
    request.close()
    (prefill,) = router.prefill
    assert prefill.cancels == [prefill.submits[0].request_id]
    prefill.prefilled("H")
    assert prefill.releases == ["lease"]
    assert not sink.updates
    assert router.is_quiet()


@pytest.mark.wing("router.grammar")
async def test_a_grammar_that_may_have_stopped_a_worker_is_not_given_to_another() -> None:
    """Other requests go on elsewhere, also one that has followed a grammar for a while."""
    router = Router(decode=2)
    router.decode[1].link.lost("started later")
    requests = {name: router.request(grammar=text) for name, text in GRAMMARS_OF.items()}
    first, second = router.decode
    for name, text in (("begun", "abcdef"), ("suspect", "a")):
        leg = requests[name][0].choices[0].leg
        assert leg is not None
        for byte in text.encode():
            first.link.apply(pb.StepReport(deltas=[pb.TokenDelta(request_id=leg.leg_id, token_ids=[byte])]))
    for request, _ in requests.values():
        leg = request.choices[0].leg
        assert leg is not None
        assert leg.link is first.link
        leg.opened -= 4.0  # the default of --stall-seconds
    second.come_back()
    first.link.lost("out of service: no step for 3 s")
    assert [type(error) for error in requests["suspect"][1].errors] == [EngineError]
    assert "grammar" in str(requests["suspect"][1].errors[0])
    assert [bytes(submit.output_token_ids) for submit in second.submits] == [b"abcdef", b""]
    assert not requests["begun"][1].errors
    assert not requests["plain"][1].errors


@pytest.mark.parametrize(("seconds", "num_steps"), [(4.0, 7), (1.5, 0)])
async def test_a_grammar_goes_on_elsewhere_when_its_worker_made_steps_until_it_was_lost(
    seconds: float, num_steps: int
) -> None:
    """1.5 s: a slow CPU's step with a prompt, in which the worker was killed."""
    router = Router(decode=2)
    request, sink = router.request(grammar="regex:.*")
    leg = request.choices[0].leg
    assert leg is not None
    leg.opened -= seconds
    leg.link.apply(pb.StepReport(load=pb.LoadReport(num_steps=num_steps)))
    leg.link.lost("killed")
    assert not sink.errors
    assert request.choices[0].journal.num_legs == 2


async def test_a_choice_that_waits_goes_on_where_it_was() -> None:
    router = Router(prefill=1)
    (prefill,), (decode,) = router.prefill, router.decode
    request, sink = router.request()
    decode.link.lost("killed")
    prefill.prefilled("H")
    assert request.is_waiting_for_worker
    decode.come_back()
    await asyncio.sleep(0)
    assert not request.is_waiting_for_worker
    assert decode.submits[-1].kv_handle == HANDLE
    assert len(prefill.submits) == 1
    decode.says("i", finish_reason=pb.FINISH_REASON_STOP)
    assert sink.text() == "Hi"
    assert router.is_quiet()


async def test_all_that_wait_go_on_in_the_order_in_which_they_came() -> None:
    router = Router()
    (decode,) = router.decode
    decode.link.lost("killed")
    requests = [router.request(num_prompts=2) for _ in range(3)]
    decode.come_back()
    await asyncio.sleep(0)
    assert [submit.sampling.seed for submit in decode.submits] == [0, 1] * 3
    for request, _ in requests:
        request.close()
    assert router.is_quiet()


async def test_nobody_waits_for_a_worker_that_has_been_away_for_too_long() -> None:
    router = Router(worker_wait_seconds=0.0)
    router.decode[0].link.lost("killed")
    _, sink = router.request()
    assert isinstance(sink.errors[0], UnavailableError)
    assert router.is_quiet()


@pytest.mark.parametrize(
    ("code", "kind"),
    [(pb.FAILURE_CODE_UNAVAILABLE, UnavailableError), (pb.FAILURE_CODE_RESOURCE_EXHAUSTED, OverloadedError)],
)
async def test_tries_that_bring_no_token_are_limited(code: int, kind: type[MiniInferError]) -> None:
    router = Router(decode=2, max_retries=2)
    _, sink = router.request()
    for number in range(3):
        worker = max(router.decode, key=lambda worker: worker.link.num_open)
        if number < 2:
            worker.says("x")  # progress: as often as it must
        worker.fails(code)
    assert not sink.errors
    max(router.decode, key=lambda worker: worker.link.num_open).fails(code)
    assert [type(error) for error in sink.errors] == [kind]
    assert sink.text() == "xx"
    assert router.is_quiet()


@pytest.mark.parametrize(
    "code", [pb.FAILURE_CODE_INTERNAL, pb.FAILURE_CODE_UNAVAILABLE, pb.FAILURE_CODE_RESOURCE_EXHAUSTED]
)
async def test_where_prefill_fails_decode_computes_the_prompt(code: int) -> None:
    router = Router(prefill=1)
    _, sink = router.request()
    router.prefill[0].fails(code)
    assert len(router.prefill[0].submits) == 1
    assert not router.decode[0].submits[0].HasField("kv_handle")
    router.decode[0].fails(pb.FAILURE_CODE_INTERNAL)  # but this is not recovered
    assert isinstance(sink.errors[0], EngineError)
    assert router.is_quiet()


async def test_without_a_handle_decode_computes_the_prompt() -> None:
    """The prefill worker had no room to keep the KV."""
    router = Router(prefill=1)
    _, sink = router.request()
    router.prefill[0].says("H", finish_reason=pb.FINISH_REASON_PREFILLED)
    [submit] = router.decode[0].submits
    assert not submit.HasField("kv_handle")
    assert bytes(submit.output_token_ids) == b"H"
    router.decode[0].says("i", finish_reason=pb.FINISH_REASON_STOP)
    assert sink.text() == "Hi"


@pytest.mark.wing("router.stop_strings")
async def test_kv_is_released_when_the_first_token_ends_the_text() -> None:
    router = Router(prefill=1)
    _, sink = router.request(stops=("!",))
    router.prefill[0].prefilled("!")
    assert sink.ends() == [(0, "stop", "!")]
    assert router.prefill[0].releases == ["lease"]
    assert not router.decode[0].submits
    assert router.is_quiet()


@pytest.mark.wing("router.stop_strings")
async def test_a_stop_string_ends_the_choice_and_tells_the_worker() -> None:
    router = Router()
    (decode,) = router.decode
    _, sink = router.request(stops=("END",))
    decode.says("so E")
    assert sink.text() == "so "
    decode.says("ND and more")
    assert sink.ends() == [(0, "stop", "END")]
    assert decode.cancels == [decode.submits[0].request_id]
    assert router.is_quiet()


@pytest.mark.wing("router.stop_strings")
async def test_the_deadline_cuts_every_choice_once_one_has_a_token() -> None:
    router = Router()
    (decode,) = router.decode
    _, sink = router.request(num_prompts=2, seconds=0.05, stops=("STOP",))
    decode.link.apply(pb.StepReport(deltas=[delta_of(decode.submits[0], "so far ST")]))  # the other one has nothing
    assert sink.text() == "so far "  # the rest may become a stop string
    async with asyncio.timeout(60):
        while len(sink.ends()) < 2:
            await asyncio.sleep(0.005)
    assert sorted(sink.ends()) == [(0, "length", "deadline"), (1, "length", "deadline")]
    assert (sink.text(0), sink.text(1)) == ("so far ST", "")
    assert not sink.errors
    assert len(decode.cancels) == 2
    assert router.is_quiet()


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_the_deadline_fails_a_request_without_a_token(is_waiting: bool) -> None:
    router = Router()
    if is_waiting:
        router.decode[0].link.lost("killed")
    request, sink = router.request(num_choices=2, seconds=0.01)
    assert request.is_waiting_for_worker == is_waiting
    await until(lambda: sink.errors)
    assert [type(error) for error in sink.errors] == [DeadlineExceededError]
    assert router.is_quiet()


@pytest.mark.wing("router.several_choices")
async def test_other_choices_of_a_prompt_start_when_it_is_computed() -> None:
    router = Router()
    (decode,) = router.decode
    request, sink = router.request(num_choices=3)
    assert [choice.state for choice in request.choices] == [State.DECODE, State.NEW, State.NEW]
    decode.says("a")
    assert len(decode.submits) == 1  # first the rest of the report: KV events
    await asyncio.sleep(0)
    assert [choice.state for choice in request.choices] == [State.DECODE] * 3
    decode.says("c")
    assert sink.updates[-1] == (2, Update("c", [ord("c")], [], []))
    request.close()
    assert router.is_quiet()


async def test_a_choice_that_fails_ends_all_others() -> None:
    router = Router()
    (decode,) = router.decode
    _, sink = router.request(num_prompts=3)
    decode.fails(pb.FAILURE_CODE_INTERNAL)
    assert [type(error) for error in sink.errors] == [EngineError]
    assert len(decode.cancels) == 2
    assert b'vllm:request_success_total{finished_reason="error",model_name="dry-run"} 1.0' in router.metrics.render()
    assert router.is_quiet()


async def test_all_legs_of_a_lost_worker_fail_also_when_one_ends_others() -> None:
    router = Router(max_retries=0)
    sinks = [router.request(num_prompts=2)[1] for _ in range(2)]
    router.decode[0].link.lost("killed")
    assert [len(sink.errors) for sink in sinks] == [1, 1]
    assert router.is_quiet()


async def test_a_bug_behind_one_token_ends_its_request_only() -> None:
    router = Router()
    (decode,) = router.decode
    broken, other = router.request(), router.request()

    def on_update(index: int, update: Update) -> None:
        raise KeyError

    broken[1].on_update = on_update  # type: ignore[method-assign]
    deltas = [pb.TokenDelta(request_id=submit.request_id, token_ids=[65]) for submit in decode.submits]
    decode.link.apply(pb.StepReport(deltas=deltas))
    assert [type(error) for error in broken[1].errors] == [KeyError]
    assert other[1].text() == "A"
    other[0].close()
    assert router.is_quiet()


async def test_a_scrape_counts_tokens_of_open_choices_and_no_token_twice() -> None:
    router = Router(decode=1)
    request, _ = router.request()
    worker = router.decode[0]

    def scraped() -> list[float]:
        router.metrics.read(router.workers, router.dispatcher.open_choices)
        lines = router.metrics.render().decode().splitlines()
        wanted = ("vllm:generation_tokens_total{", 'mini_infer_open_choices{model_name="dry-run",state="running"')
        return [float(line.split()[-1]) for name in wanted for line in lines if line.startswith(name)]

    assert scraped() == [0, 0]
    worker.says("abc", times=pb.RequestTimes(queue_seconds=0.5, prefill_seconds=2.0))
    assert scraped() == [3, 1]
    assert scraped() == [3, 1]
    [journal] = [choice.journal for choice in request.choices]
    worker.says("de", finish_reason=pb.FINISH_REASON_LENGTH, num_draft_tokens=4, num_accepted_tokens=2)
    assert scraped() == [5, 0]
    assert (journal.num_draft_tokens, journal.num_accepted_tokens) == (4, 2)
    request.close()
    text = router.metrics.render().decode()
    for name in ("time_to_first_token", "inter_token_latency"):  # less than a test takes
        [line] = [line for line in text.splitlines() if line.startswith(f"vllm:{name}_seconds_sum{{")]
        assert 0 <= float(line.split()[-1]) < 100
    assert 'vllm:request_queue_time_seconds_sum{model_name="dry-run"} 0.5' in text
    assert 'vllm:request_prefill_time_seconds_sum{model_name="dry-run"} 2.0' in text
    assert 'vllm:request_max_num_generation_tokens_sum{model_name="dry-run"} 5.0' in text


async def test_a_choice_that_no_worker_takes_is_refused_and_counts_in_no_latency() -> None:
    router = Router(decode=1, max_retries=0)
    request, sink = router.request()
    router.decode[0].fails(pb.FAILURE_CODE_RESOURCE_EXHAUSTED)
    assert [type(error) for error in sink.errors] == [OverloadedError]
    request.close()
    text = router.metrics.render().decode()
    assert 'vllm:request_success_total{finished_reason="refused",model_name="dry-run"} 1.0' in text
    assert 'vllm:request_success_total{finished_reason="error",model_name="dry-run"} 0.0' in text
    assert 'vllm:e2e_request_latency_seconds_count{model_name="dry-run"} 0.0' in text
    assert 'vllm:prompt_tokens_total{model_name="dry-run"} 0.0' in text
