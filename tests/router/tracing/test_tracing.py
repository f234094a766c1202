"""The choice of traced requests; no request waits for a collector."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cli.cluster.ports import free_ports
from common.errors import ConfigError
from router.config import RouterConfig
from router.tracing.open_tracing import open_tracing
from router.tracing.settings import TracingSettings
from router.tracing.tracing import Tracing
from tests.harness.router import Cluster, cluster
from tests.harness.scripted_worker import Script
from tests.router.tracing.collector import children, running_collector

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "seed": 1}


def tracing_of(cluster: Cluster) -> Tracing:
    tracing = cluster.gateway._traced
    assert isinstance(tracing, Tracing)
    return tracing


@asynccontextmanager
async def traced(url: str, ratio: float = 1.0, **settings: object) -> AsyncIterator[Cluster]:
    async with cluster(otlp_traces_endpoint=url, trace_sample_ratio=ratio, **settings) as running:  # type: ignore[arg-type]
        tracing = tracing_of(running)
        try:
            yield running
        except BaseException:
            tracing.export.close()
            raise
    tracing.export.close()  # when all requests have ended


@pytest.mark.parametrize(
    ("ratio", "header", "num_traces"),
    [
        (1.0, f"00-{TRACE}-{CALLER}-00", 0),
        (0.0, f"00-{TRACE}-{CALLER}-01", 1),
        (0.0, "", 0),
        (1.0, "", 1),
        (1.0, f"00-{'0' * 32}-{CALLER}-00", 1),  # is none
        (1.0, "x" * 600, 1),
    ],
)
async def test_a_traceparent_decides_and_then_the_ratio(ratio: float, header: str, num_traces: int) -> None:
    with running_collector() as collector:
        async with traced(collector.url, ratio) as c:
            answer = await c.http.post("/v1/chat/completions", json=BODY, headers={"traceparent": header})
            assert answer.status_code == 200
            assert "traceparent" not in answer.headers
        roots = [span for span in collector.spans if span.name == "llm_request"]
        assert len(roots) == num_traces
        assert [root.parent_id for root in roots] == ([CALLER] if TRACE in header else [""]) * num_traces


async def test_a_part_of_the_requests_is_traced() -> None:
    with running_collector() as collector:
        async with traced(collector.url, 0.5) as c:
            for _ in range(64):
                await c.complete(max_tokens=1)
        roots = [span for span in collector.spans if span.name == "llm_request"]
        assert 16 <= len(roots) <= 48  # outside once in 40,000 runs, with another seed
        assert len({root.trace_id for root in roots}) == len(roots)
        assert {root.attributes["gen_ai.operation.name"] for root in roots} == {"text_completion"}


async def test_choices_have_spans_of_their_own_and_a_prompt_counts_once() -> None:
    with running_collector() as collector:
        async with traced(collector.url, num_prefill=1, local_prefill_tokens=0) as c:
            usage = (await c.chat(n=3, temperature=1.0)).json()["usage"]
        [root] = [span for span in collector.spans if span.name == "llm_request"]
        choices = children(collector.spans, root)
        assert sorted(span.attributes["mini_infer.choice.index"] for span in choices) == [0, 1, 2]
        assert {span.name for span in choices} == {"choice"}
        for choice in choices:
            names = [span.name for span in sorted(children(collector.spans, choice), key=lambda span: span.start)]
            assert names == ["accept", "prefill_leg", "decode_leg"]
        assert root.attributes["gen_ai.request.n"] == 3
        assert root.attributes["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
        assert root.attributes["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 24


async def test_a_request_that_fails_is_an_error() -> None:
    with running_collector() as collector:
        async with traced(collector.url, script=Script(has_no_handle=True), num_prefill=1, max_retries=0) as c:
            c.decode[0].script.die_after_tokens = 3
            assert (await c.chat()).status_code == 503
        [root] = [span for span in collector.spans if span.name == "llm_request"]
        assert root.error == "error"
        assert root.attributes["gen_ai.response.finish_reasons"] == ["error"]


async def test_a_dead_collector_changes_no_answer_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    [port] = free_ports(1)
    async with cluster() as plain:
        expected = (await plain.chat()).json()["choices"]
    async with traced(f"http://127.0.0.1:{port}") as c:
        export = tracing_of(c).export
        export._exporter._exporter._client._timeout = 0.1  # type: ignore[attr-defined]
        for _ in range(3):
            assert (await c.chat()).json()["choices"] == expected
            export.provider.force_flush()
        assert [record.getMessage() for record in caplog.records] == [
            "traces are lost: the collector of --otlp-traces-endpoint does not take them"
        ]
        assert (await c.chat()).json()["choices"] == expected
        export._exporter._exporter._client._timeout = 60.0  # type: ignore[attr-defined]
        began = time.monotonic()
        export.close()
        assert time.monotonic() - began < 10  # else the exporter's retries


async def test_a_collector_that_is_back_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.tracing")
    with running_collector() as collector:
        collector.status = 400
        async with traced(collector.url) as c:
            for status in (400, 200, 200):
                collector.status = status
                await c.chat()
                tracing_of(c).export.provider.force_flush()
        assert [record.getMessage()[:17] for record in caplog.records] == ["traces are lost: ", "traces are taken "]
        assert len([span for span in collector.spans if span.name == "llm_request"]) == 2


def test_without_an_endpoint_nothing_of_the_sdk_is_imported() -> None:
    code = (
        "import sys, router.server, router.config, router.tracing.open_tracing as o;"
        "assert o.open_tracing(router.config.RouterConfig(decode='a:1')) is None;"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "router.tracing.export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'mini-infer\[tracing\]'"):
        open_tracing(RouterConfig(decode="a:1", otlp_traces_endpoint="http://collector:4318"))  # type: ignore[call-arg]


@pytest.mark.parametrize("fields", [{"trace_sample_ratio": 1.5}, {"otlp_traces_endpoint": "collector:4318"}])
def test_settings_that_cannot_work(fields: dict) -> None:
    [name] = fields
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}"):
        RouterConfig(decode="a:1", **fields)


def test_an_endpoint_without_a_path_has_the_one_of_otlp() -> None:
    for given in ("http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"):
        assert TracingSettings(given).url == "http://c:4318/v1/traces"
    assert TracingSettings("https://c/other").url == "https://c/other"
