"""Deadlines that clients send for their requests."""

from __future__ import annotations

import time

import pytest

from router.client_timeouts.headers import timeout_seconds
from tests.harness.router import cluster
from tests.harness.scripted_worker import Script


@pytest.mark.parametrize(
    ("headers", "is_stream", "expected"),
    [
        ({}, False, 590.0),
        ({"x-request-timeout": "2.5"}, True, 2.5),
        ({"x-request-timeout": "1e9"}, False, 590.0),
        ({"x-request-timeout": "100", "x-stainless-timeout": "20"}, False, 100.0),
        ({"x-stainless-timeout": "20"}, False, 19.0),
        ({"x-stainless-read-timeout": "20.0"}, False, 19.0),
        ({"x-stainless-timeout": "600", "x-stainless-read-timeout": "600.0"}, False, 590.0),  # as OpenAI's send
        ({"x-stainless-timeout": "400"}, False, 390.0),
        ({"x-stainless-timeout": "20"}, True, 590.0),
        ({"x-stainless-timeout": "-3", "x-stainless-read-timeout": "NOT_GIVEN"}, False, 590.0),
        ({"x-stainless-timeout": "nan"}, False, 590.0),
    ],
)
def test_headers(headers: dict[str, str], is_stream: bool, expected: float) -> None:
    assert timeout_seconds(headers, is_stream, 590.0) == expected


async def test_an_answer_that_the_clients_deadline_cut_says_so() -> None:
    body = {"prompt": "x", "max_tokens": 100_000}
    async with cluster(script=Script(delay_seconds=0.005), info={"max_model_len": 1 << 20}) as c:
        for headers in ({"X-Request-Timeout": "0.5"}, {"x-stainless-read-timeout": "0.5"}):
            for _ in range(10):  # until a token comes in time, which a busy machine may not manage
                began = time.monotonic()
                answer = await c.http.post("/v1/completions", json=body, headers=headers)
                assert time.monotonic() - began >= 0.45
                if answer.status_code == 200:
                    break
            (choice,) = answer.json()["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
            assert len(choice["text"]) == answer.json()["usage"]["completion_tokens"] > 0
        c.decode[0].script.is_silent = True
        answer = await c.http.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.2"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        await c.until(c.is_quiet)
        assert len(c.decode[0].cancels) == len(c.decode[0].submits)


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf"])
async def test_what_is_no_time_is_refused_unless_a_clients_library_says_it(value: str) -> None:
    async with cluster() as c:
        answer = await c.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-timeout": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout")
        headers = {"x-stainless-timeout": value, "x-stainless-read-timeout": value}
        assert (await c.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
