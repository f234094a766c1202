"""A trace of a real cluster: the spans of a streamed chat at its collector."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.harness.cluster import running_cluster
from tests.router.tracing.collector import Received, children, running_collector

CALLER = "00f067aa0ba902b7"
PROMPT = "Tell me about routers, and why they know where a prompt has been computed before. " * 3


def check_nested(spans: list[Received], root: Received) -> list[Received]:
    """Check that children lie within parents and the root's follow each other without a gap; return the latter."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        if span is not root:
            parent = by_id[span.parent_id]
            assert parent.start - 1e-6 <= span.start <= span.end <= parent.end + 1e-6, (span, parent)
    top = children(spans, root)
    assert all(after.start == pytest.approx(before.end, abs=1e-5) for before, after in pairwise(top))
    assert sum(span.seconds for span in top) == pytest.approx(root.seconds, abs=1e-4)
    return top


def test_a_streamed_chat_is_a_trace_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    with running_collector() as collector:
        flags = [f"--otlp-traces-endpoint={collector.url}", "--trace-sample-ratio=0"]
        with running_cluster(router_args=flags) as cluster, cluster.client() as client:
            chunks = client.chat.completions.create(
                model="dry-run", messages=[{"role": "user", "content": PROMPT}], max_tokens=24, stream=True,
                temperature=0.0, extra_body={"ignore_eos": True},
                extra_headers={"traceparent": f"00-{trace_id}-{CALLER}-01"},
            )  # fmt: skip
            [response_id] = {chunk.id for chunk in chunks}
            [shown] = cluster.get(f"/explain/{response_id}")["choices"]
            spans = collector.trace(trace_id)
    [root] = [span for span in spans if span.name == "llm_request"]
    assert (root.parent_id, root.service, root.error, root.kind) == (CALLER, "mini-infer-router", "", 2)
    told = root.attributes
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
