"""The spans of a request as plain data, made from its choices' journals. Knows nothing of OpenTelemetry.

Names and attributes are those of vLLM and of OpenTelemetry's conventions for generative AI; others are called
`mini_infer.*`. Times are this process's time.monotonic(): workers' measurements are durations, placed just before the
output that came with them, so that clocks need not agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protos import types_pb2 as pb
from router.journal import DEADLINE_EXCEEDED, FIRST_OUTPUT, MOVED, WAITING, Event, Journal

Value = str | bool | int | float | Sequence[str]
OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion"}  # by prefix of the request id; others compute vectors
FAILED = frozenset({"error", "refused"})
WORKER, FROM_WORKER, TO_WORKER = "mini_infer.worker.id", "mini_infer.worker.from", "mini_infer.worker.to"


@dataclass(slots=True)
class Span:
    name: str
    start: float
    end: float
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""  # why it failed; empty: it did not fail
    children: list[Span] = field(default_factory=list)


def request_span(request_id: str, model: str, choices: Mapping[Journal, int], end: float) -> Span:
    """Return the span of a request that has ended. choices: the index of its prompt for each choice's journal."""
    journals = [*choices]
    arrival = journals[0].arrival
    outcomes = [journal.outcome for journal in journals]
    span = Span("llm_request", arrival, end, _request_attributes(request_id, model, choices, end))
    span.error = next((outcome for outcome in outcomes if outcome in FAILED), "")
    if len(journals) == 1:
        span.children = _choice_spans(journals[0], end)
        return span
    for index, journal in enumerate(journals):
        if journal.events:
            children = _choice_spans(journal, _end_of(journal, end))
            choice = Span("choice", arrival, children[-1].end, {"mini_infer.choice.index": index}, children=children)
            choice.error = journal.outcome if journal.outcome in FAILED else ""
            span.children.append(choice)
    return span


def _request_attributes(request_id: str, model: str, choices: Mapping[Journal, int], end: float) -> dict[str, Value]:
    journals = [*choices]
    first = min(journals, key=lambda journal: journal.first_token_time or end)
    prompts = {prompt: journal for journal, prompt in choices.items()}.values()
    num_prompt_tokens = sum(len(journal.prompt_token_ids) for journal in prompts)
    num_output_tokens = sum(len(journal.output_token_ids) for journal in journals)
    sampling = first.sampling
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": OPERATIONS.get(request_id.partition("-")[0], "embeddings"),
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": request_id,
        "gen_ai.response.id": request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": len(journals),
        "gen_ai.response.finish_reasons": [journal.outcome for journal in journals],
        # vLLM's names, and the newer names of the conventions.
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.completion_tokens": num_output_tokens,
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": sum(journal.num_cached_tokens for journal in prompts),
        "gen_ai.latency.e2e": end - first.arrival,
    }
    if first.first_times is not None:
        attributes["gen_ai.latency.time_in_queue"] = first.first_times.queue_seconds
        attributes["gen_ai.latency.time_in_model_prefill"] = first.first_times.prefill_seconds
    if first.has_started:
        attributes["gen_ai.latency.time_to_first_token"] = first.first_token_time - first.arrival
        attributes["gen_ai.latency.time_in_model_decode"] = first.last_token_time - first.first_token_time
    if num_moves := sum(journal.num_migrations + journal.num_moves for journal in journals):
        attributes["mini_infer.moves"] = num_moves
    return attributes


def _end_of(journal: Journal, request_end: float) -> float:
    """Return when a choice ended, since the choices of a request end at different times."""
    if journal.outcome in FAILED or journal.outcome == "abort" or not journal.has_started:
        return request_end
    return max(journal.last_token_time, journal.events[-1].time)


def _choice_spans(journal: Journal, end: float) -> list[Span]:
    """Return consecutive spans from the choice's arrival to its end: one for each leg, move and wait for a worker."""
    span = Span("accept", journal.arrival, end)
    spans = [span]

    def begin(name: str, now: float, **attributes: Value) -> Span:
        spans[-1].end = now
        spans.append(Span(name, now, end, attributes))
        return spans[-1]

    for index, event in enumerate(journal.events):
        if event.what == FIRST_OUTPUT:
            following = journal.events[index + 1 :]
            leg_end, num_tokens = end, len(journal.output_token_ids)
            if following:
                leg_end, num_tokens = following[0].time, following[0].num_output_tokens
            span.children = _parts_of_leg(span, event, leg_end, num_tokens)
        elif event.what == MOVED:
            worker = span.attributes.get(WORKER, "")
            span.error = event.reason
            span = begin("move", event.time, **{FROM_WORKER: worker, "mini_infer.move.reason": event.reason})
        elif event.what == WAITING:
            if span.name != "move":
                span = begin("wait_for_worker", event.time)
        elif event.what != DEADLINE_EXCEEDED:  # a leg begins
            if span.name == "move":
                span.attributes[TO_WORKER] = event.worker
            span = begin(f"{event.what}_leg", event.time, **{WORKER: event.worker})
    return spans


def _parts_of_leg(leg: Span, first_output: Event, end: float, num_tokens: int) -> list[Span]:
    """Return the spans of a worker's part in a leg. num_tokens: output tokens of the choice at the leg's end."""
    times = first_output.times or pb.RequestTimes()
    now = first_output.time
    computed = max(now - times.prefill_seconds, leg.start)
    pulled = max(computed - times.kv_pull_seconds, leg.start)
    spans = [Span("queue", max(pulled - times.queue_seconds, leg.start), pulled)]
    has_kv = bool(times.transport) and not times.kv_pull_failed
    if times.transport or times.kv_pull_failed:
        attributes: dict[str, Value] = {
            "mini_infer.kv.transport": times.transport,
            "mini_infer.kv.pulled_tokens": times.num_pulled_tokens,
            "mini_infer.kv.prefetched_tokens": times.num_prefetched_tokens,
            "mini_infer.kv.pull_failed": times.kv_pull_failed,
        }
        reason = "the KV could not be read: the prompt was computed here" if times.kv_pull_failed else ""
        spans.append(Span("kv_pull", pulled, computed, attributes, reason))
    if not has_kv:
        spans.append(Span("prefill", computed, now, {"mini_infer.cached_tokens": times.num_cached_tokens}))
    if leg.name == "decode_leg":
        num_new = num_tokens - first_output.num_output_tokens + 1
        spans.append(Span("decode", computed if has_kv else now, end, {"mini_infer.output_tokens": num_new}))
    return spans
