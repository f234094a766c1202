"""Traces of a real cluster: what its collector gets of a streamed chat, and of one whose decode worker is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.harness.cluster import SHORT_LEASES, Cluster, running_cluster
from tests.router.tracing.collector import Collector, Received, children, running_collector

CALLER = "00f067aa0ba902b7"
PROMPT = "Tell me about routers, and why they know where a prompt has been computed before. " * 3


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with running_cluster(
            num_prefill=1, num_decode=2, worker_args=SHORT_LEASES,
            router_args=[f"--otlp-traces-endpoint={collector.url}", "--trace-sample-ratio=0", "--log-format=json"],
        ) as running:  # fmt: skip
            yield running


def stream(cluster: Cluster, trace_id: str, prompt: str, max_tokens: int, kill_after: int = 0) -> tuple[str, int]:
    """The id of a streamed chat of a sampled trace, and its number of chunks with text."""
    num_chunks, response_id = 0, ""
    with cluster.client() as client:
        for chunk in client.chat.completions.create(
            model="dry-run", messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, stream=True,
            temperature=0.0, extra_body={"ignore_eos": True},
            extra_headers={"traceparent": f"00-{trace_id}-{CALLER}-01"},
        ):  # fmt: skip
            response_id = chunk.id
            num_chunks += bool(chunk.choices and chunk.choices[0].delta.content)
            if num_chunks == kill_after != 0:
                kill_after = 0
                [_, leg] = cluster.legs_of(response_id)
                cluster.services[leg["worker"]].kill()
    return response_id, num_chunks


def check_nested(spans: list[Received], root: Received) -> list[Received]:
    """Children lie within their parents, and those of the root follow each other without a gap; return these."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        if span is not root:
            parent = by_id[span.parent_id]
            assert parent.start - 1e-6 <= span.start <= span.end <= parent.end + 1e-6, (span, parent)
    top = children(spans, root)
    assert all(after.start == pytest.approx(before.end, abs=1e-5) for before, after in pairwise(top))
    assert sum(span.seconds for span in top) == pytest.approx(root.seconds, abs=1e-4)
    return top


def test_a_streamed_chat_is_a_trace_of_its_caller(cluster: Cluster, collector: Collector) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    response_id, _ = stream(cluster, trace_id, PROMPT, 24)
    spans = collector.trace(trace_id)
    [root] = [span for span in spans if span.name == "llm_request"]
    assert (root.parent_id, root.service, root.error, root.kind) == (CALLER, "mini-infer-router", "", 2)
    told, shown = root.attributes, cluster.get(f"/explain/{response_id}")["choices"][0]
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "dry-run"
    assert told["gen_ai.request.id"] == response_id
    assert told["gen_ai.request.max_tokens"] == 24
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    for name in ("prompt", "input"):
        assert told[f"gen_ai.usage.{name}_tokens"] == shown["prompt_tokens"]
    for name in ("completion", "output"):
        assert told[f"gen_ai.usage.{name}_tokens"] == 24
    assert told["gen_ai.latency.e2e"] == pytest.approx(root.seconds, abs=1e-5)
    assert 0 < told["gen_ai.latency.time_to_first_token"] < root.seconds
    assert 0 <= told["gen_ai.latency.time_in_queue"] < told["gen_ai.latency.time_to_first_token"]

    accept, prefill_leg, decode_leg = check_nested(spans, root)
    assert [accept.name, prefill_leg.name, decode_leg.name] == ["accept", "prefill_leg", "decode_leg"]
    assert prefill_leg.attributes["mini_infer.worker.id"] == "prefill-0"
    assert decode_leg.attributes["mini_infer.worker.id"] == shown["workers"][1]["worker"]
    queue, prefill = children(spans, prefill_leg)
    assert (queue.name, prefill.name) == ("queue", "prefill")
    assert prefill.seconds == pytest.approx(shown["workers"][0]["prefill_seconds"], abs=1e-5)
    queue, pull, decode = children(spans, decode_leg)
    assert (queue.name, pull.name, decode.name) == ("queue", "kv_pull", "decode")
    assert pull.attributes["mini_infer.kv.transport"] == shown["workers"][1]["transport"] != ""
    assert pull.attributes["mini_infer.kv.pull_failed"] is False
    came = pull.attributes["mini_infer.kv.pulled_tokens"] + pull.attributes["mini_infer.kv.prefetched_tokens"]
    assert came == pytest.approx(shown["prompt_tokens"], abs=16)  # less than a block stays
    assert decode.attributes["mini_infer.output_tokens"] == 23  # the prefill worker made the first
    assert decode.end == pytest.approx(root.end, abs=1e-5)
    # The first token is the prefill worker's last word.
    assert prefill.end - root.start == pytest.approx(told["gen_ai.latency.time_to_first_token"], abs=1e-4)


def test_a_killed_decode_worker_is_a_move(cluster: Cluster, collector: Collector) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    # Long: this process reads a stream more slowly than the worker writes it, and must kill it before its end.
    response_id, _ = stream(cluster, trace_id, "Another one. " + PROMPT, 1500, kill_after=3)
    lines = map(json.loads, cluster.services["router"].log().splitlines()[1:])  # the first says where it listens
    [moves] = [line["message"] for line in lines if line.get("request_id") == response_id]
    assert "moves to another worker" in moves
    spans = collector.trace(trace_id)
    [root] = [span for span in spans if span.name == "llm_request"]
    assert root.attributes["mini_infer.moves"] == 1
    assert root.attributes["gen_ai.usage.output_tokens"] == 1500
    _, _, lost, move, decode_leg = check_nested(spans, root)
    assert [lost.name, move.name, decode_leg.name] == ["decode_leg", "move", "decode_leg"]
    ids = {lost.attributes["mini_infer.worker.id"], decode_leg.attributes["mini_infer.worker.id"]}
    assert ids == {"decode-0", "decode-1"}
    assert move.attributes["mini_infer.worker.from"] == lost.attributes["mini_infer.worker.id"]
    assert move.attributes["mini_infer.worker.to"] == decode_leg.attributes["mini_infer.worker.id"]
    assert "was lost" in lost.error
    assert (root.error, decode_leg.error) == ("", "")
    *_, before = children(spans, lost)
    *_, after = children(spans, decode_leg)
    assert before.attributes["mini_infer.output_tokens"] + after.attributes["mini_infer.output_tokens"] == 1499
