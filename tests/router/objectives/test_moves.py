"""Choices that prefill workers keep, and their moves, pushed by hand."""

from __future__ import annotations

import asyncio

from common.step_times import StepCost
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.choice import Choice, State
from router.costs.meter import meter_of
from router.metrics import PLACEMENTS
from router.objectives.adaptive import kept_leg, move
from router.routing.views import Candidate
from tests.harness.waiting import until
from tests.router.pushed import HANDLE, Listener, Router, Worker

COST = StepCost(base=0.0043, row=18e-6, prompt=0.0005, prompt_token=22e-6)
FULL = pb.LoadReport(num_running=8, num_waiting=20)
EMPTY = pb.LoadReport()


def adaptive(decode: int = 1) -> Router:
    """Make a router with measured workers, whose decode workers have no free seat."""
    router = Router(prefill=1, decode=decode, ttft_objective_ms=1000, itl_objective_ms=25)
    for worker in (*router.prefill, *router.decode):
        meter_of(worker.link).rates.step_times.cost = COST
    for worker in router.decode:
        worker.link.load = FULL
    return router


def kept(router: Router) -> tuple[Choice, Listener]:
    request, sink = router.request()
    [choice] = request.choices
    router.prefill[0].says("H")
    return choice, sink


def handed_over(worker: Worker) -> list[str]:
    return [command.hand_over.request_id for command in worker.commands if command.HasField("hand_over")]


def candidate(decode: str) -> Candidate:
    return Candidate(
        decode=WorkerId(decode), prefill=WorkerId("p0"), cost=0.1, terms={"decode": 0.1}, cached_tokens=0, load=0,
        is_measured=True,
    )  # fmt: skip


def num_placed(router: Router) -> dict[str, float]:
    text = router.metrics.render().decode()
    found = {}
    for kind in PLACEMENTS:
        [line] = [line for line in text.splitlines() if "_placements_total{" in line and f'"{kind}"' in line]
        found[kind] = float(line.split()[-1])
    return found


async def test_a_kept_choice_decodes_where_its_prompt_was_computed() -> None:
    router = adaptive()
    choice, sink = kept(router)
    [submit] = router.prefill[0].submits
    assert submit.keep
    assert submit.due_seconds < 0  # three tokens delay nobody
    assert choice.state is State.DECODE
    assert meter_of(router.prefill[0].link).view().num_rows == 1
    router.prefill[0].says("i!", finish_reason=pb.FINISH_REASON_LENGTH)
    assert sink.text() == "Hi!"
    assert num_placed(router) == {"disaggregated": 0, "local": 0, "kept": 1}
    assert meter_of(router.prefill[0].link).view().num_rows == 0


async def test_a_move_continues_with_the_token_that_ended_the_leg() -> None:
    router = adaptive()
    choice, sink = kept(router)
    [prefill], [decode] = router.prefill, router.decode
    move(choice, candidate("d0"))
    assert handed_over(prefill) == [prefill.submits[0].request_id]
    decode.link.load = EMPTY
    before = meter_of(decode.link).view().num_rows
    prefill.says("e")  # in flight
    prefill.prefilled("l")
    [submit] = decode.submits
    assert bytes(submit.output_token_ids) == b"Hel"
    assert submit.kv_handle == HANDLE
    assert meter_of(decode.link).view().num_rows == before  # expected, and now there
    decode.says("lo", finish_reason=pb.FINISH_REASON_LENGTH)
    assert sink.text() == "Hello"
    assert (choice.journal.num_moves, choice.journal.num_migrations) == (1, 0)
    assert b'mini_infer_moves_total{model_name="dry-run"} 1.0' in router.metrics.render()


async def test_prompts_make_the_dispatcher_move_what_is_kept() -> None:
    router = adaptive()
    choice, _ = kept(router)
    [prefill], [decode] = router.prefill, router.decode
    assert kept_leg(choice) is not None
    decode.link.load = EMPTY
    prefill.link.load = pb.LoadReport(waiting_prefill_tokens=8192)
    await until(lambda: handed_over(prefill))
    await asyncio.sleep(0.15)
    assert len(handed_over(prefill)) == 1  # asked once
    assert kept_leg(choice) is None
    choice.cancel()
    assert meter_of(decode.link).view().num_rows == 0


async def test_a_choice_that_ends_while_it_moves_has_ended() -> None:
    router = adaptive()
    choice, sink = kept(router)
    move(choice, candidate("d0"))
    router.prefill[0].says("i", finish_reason=pb.FINISH_REASON_STOP)
    assert choice.state is State.DONE
    assert sink.text() == "Hi"
    assert not router.decode[0].submits
    router.decode[0].link.load = EMPTY
    assert router.is_quiet()


async def test_the_worker_that_is_left_dies_before_it_hands_over() -> None:
    router = adaptive()
    choice, sink = kept(router)
    move(choice, candidate("d0"))
    router.prefill[0].link.lost("killed")
    [submit] = router.decode[0].submits
    assert bytes(submit.output_token_ids) == b"H"
    assert not submit.HasField("kv_handle")
    router.decode[0].says("i", finish_reason=pb.FINISH_REASON_LENGTH)
    assert sink.text() == "Hi"
    assert choice.journal.num_migrations == 1


async def test_the_target_dies_before_or_after_the_hand_over() -> None:
    for dies_first in (True, False):
        router = adaptive(decode=2)
        choice, sink = kept(router)
        move(choice, candidate("d0"))
        if dies_first:
            router.decode[0].link.lost("killed")
        router.prefill[0].prefilled("i")
        if not dies_first:
            assert len(router.decode[0].submits) == 1
            router.decode[0].link.lost("killed")
        [submit] = router.decode[1].submits
        assert bytes(submit.output_token_ids) == b"Hi"
        assert submit.kv_handle == HANDLE  # nobody has read it yet
        router.decode[1].says("!", finish_reason=pb.FINISH_REASON_LENGTH)
        assert sink.text() == "Hi!"


async def test_a_target_that_has_gone_is_not_moved_to() -> None:
    router = adaptive()
    choice, _ = kept(router)
    move(choice, candidate("never there"))
    assert not handed_over(router.prefill[0])
    choice.cancel()


async def test_a_worker_that_hands_over_unasked_fails_the_choice() -> None:
    router = adaptive()
    choice, sink = kept(router)
    router.prefill[0].prefilled("i")
    assert choice.state is State.DONE
    assert len(sink.errors) == 1
