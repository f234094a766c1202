"""Moves of running requests from the prefill workers that kept them to decode workers. Pure.

A kept request moves when staying costs clearly more than moving: its worker gets prompts, whose steps delay it, or
decode workers have room again. Only a new request can be kept, so a request moves at most once and never goes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from kvstore.types import WorkerId
from router.objectives.objectives import Objectives
from router.objectives.predictor import FEW_GAPS, ObjectivePredictor
from router.routing.rates import AnswerLength
from router.routing.views import EXPECTED_TOKENS, Candidate, RequestView, WorkerView

MIN_STAY_SECONDS = 0.2  # least time between the first token of a kept request and its move
MIN_TOKENS_LEFT = 8  # a request about to end is not worth a pull
MAX_MOVES = 8  # from one worker at each check, since their pulls share its memory and links
CLEARLY = 1.25  # staying must cost more than this factor times the cost of moving
PATIENCE_SECONDS = 0.1  # queued prompt work at which prompts are taken to need half of the worker's time


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """A request that decodes on the prefill worker that computed it."""

    choice_id: str
    num_tokens: int
    tokens_left: float  # expected
    seconds_here: float  # since its first token on this worker
    num_answered: int  # tokens of its answer so far


@dataclass(frozen=True, slots=True)
class Move:
    choice_id: str
    chosen: Candidate


def tokens_left(answers: AnswerLength, max_tokens: int, num_tokens: int) -> float:
    """Return the expected remaining tokens after `num_tokens`, at least a quarter of the mean length."""
    mean = answers.mean or EXPECTED_TOKENS
    return min(max(mean - num_tokens, mean / 4), max_tokens - num_tokens)


def choose_moves(
    source: WorkerView,
    kept: Sequence[KeptRequest],
    targets: Sequence[WorkerView],
    objectives: Objectives,
    must_leave: bool = False,
) -> list[Move]:
    """Choose which of the requests kept on `source` move and where, those with the most tokens left first.

    must_leave: all requests must move, because their worker drains.
    """
    moves: list[Move] = []
    views = list(targets)
    for request in sorted(kept, key=lambda item: -item.tokens_left):
        if not must_leave and (request.seconds_here < MIN_STAY_SECONDS or request.tokens_left < MIN_TOKENS_LEFT):
            continue
        found = _best_target(source, request, views, objectives, must_leave)
        if found is None or len(moves) == MAX_MOVES:
            break
        chosen, index = found
        moves.append(Move(request.choice_id, chosen))
        target = views[index]
        context = target.context_tokens + request.num_tokens
        views[index] = replace(target, num_rows=target.num_rows + 1, context_tokens=context)
        source = _without(source, request)
    return moves


def _best_target(
    source: WorkerView,
    request: KeptRequest,
    targets: Sequence[WorkerView],
    objectives: Objectives,
    must_leave: bool,
) -> tuple[Candidate, int] | None:
    """Return the cheapest target that meets the objectives and costs clearly less than staying."""
    view = RequestView(request.num_tokens, {}, request.tokens_left)
    predict = ObjectivePredictor(objectives, view, [source, *targets])
    stay = inf if must_leave else _stay_seconds(predict, source, request)
    best: tuple[Candidate, int] | None = None
    for index, target in enumerate(targets):
        itl = predict.gap_seconds(target)
        if request.num_answered + request.tokens_left <= FEW_GAPS:
            itl = predict.hand_over_seconds(target)
        has_room = target.load < target.num_slots and not (objectives.itl and itl > objectives.itl)
        if not (has_room or must_leave):
            continue
        terms = {
            "pull": predict.pull_seconds(target, request.num_tokens),
            "decode": request.tokens_left * predict.decode_seconds(target),
            "crowding": request.tokens_left * predict.crowding_seconds(target),
        }
        cost = sum(terms.values())
        if CLEARLY * cost < stay and (best is None or cost < best[0].cost):
            if not must_leave:
                terms["stay"] = stay
            best = _candidate(source.worker_id, target, terms, cost, itl), index
    return best


def _stay_seconds(predict: ObjectivePredictor, source: WorkerView, request: KeptRequest) -> float:
    """Cost of staying: its own tokens next to prompts, and the delay it causes to other rows and prompts."""
    others = _without(source, request)
    queue = predict.queue_seconds(source)
    alone = predict.queue_seconds(replace(source, num_rows=0))
    delay_of_prompts = (queue - alone) / max(source.num_rows, 1)
    own = predict.decode_seconds(others)
    own += predict.interruption_seconds(others, share=queue / (queue + PATIENCE_SECONDS))
    return request.tokens_left * (own + predict.crowding_seconds(others)) + delay_of_prompts


def _without(source: WorkerView, request: KeptRequest) -> WorkerView:
    context = max(source.context_tokens - request.num_tokens, 0)
    return replace(source, num_rows=max(source.num_rows - 1, 0), context_tokens=context)


def _candidate(source: WorkerId, target: WorkerView, terms: dict[str, float], cost: float, itl: float) -> Candidate:
    return Candidate(
        decode=target.worker_id,
        prefill=source,
        cost=cost,
        terms=terms,
        cached_tokens=0,
        load=target.load,
        is_measured=True,
        itl_seconds=itl,
    )
