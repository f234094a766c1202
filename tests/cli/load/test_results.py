import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.client.event_stream import RequestRecord
from cli.load.results import Objectives, distribution_ms, percentile, summarize


def record(sent: float, *chunks: float, tokens: int | None = None, error: str = "") -> RequestRecord:
    return RequestRecord(
        scheduled=sent, sent=sent, chunk_times=list(chunks), end=chunks[-1] if chunks else sent,
        num_prompt_tokens=10, num_output_tokens=len(chunks) if tokens is None else tokens, error=error,
    )  # fmt: skip


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentile_equals_numpy(values, quantile):
    assert percentile(values, quantile) == pytest.approx(float(np.percentile(values, quantile * 100)), abs=1e-6)


def test_times_of_one_request():
    one = record(1.0, 1.5, 1.6, 1.9, tokens=5)
    assert one.ttft == 0.5
    assert one.gaps == pytest.approx([0.1, 0.3])
    assert one.tpot == pytest.approx(0.4 / 4)
    assert one.e2e == pytest.approx(0.9)
    assert record(0.0, 1.0).tpot is None


def test_a_request_is_good_only_within_every_objective():
    steady = record(0.0, 0.1, 0.12, 0.14)
    late = record(0.0, 0.3, 0.32)
    stuttering = record(0.0, 0.1, 0.4)
    failed = record(0.0, 0.1, error="timeout")
    both = Objectives(ttft_ms=200, itl_ms=50)
    assert [both.met_by(one) for one in (steady, late, stuttering, failed)] == [True, False, False, False]
    assert Objectives(ttft_ms=200).met_by(stuttering)
    assert Objectives(itl_ms=50).met_by(late)
    assert not Objectives().met_by(record(0.0))


def test_summary_counts_errors_by_kind_and_leaves_them_out_of_rates():
    records = [
        record(0.0, 0.1, 0.2),
        record(0.0, 0.3, 0.5),
        record(0.0, error="http 429"),
        record(0.0, 0.1, error="disconnected"),
    ]
    summary = summarize(records, 0.5, Objectives(ttft_ms=150))
    assert summary["num_completed"] == 2
    assert summary["errors"] == {"http 429": 1, "disconnected": 1}
    assert summary["output_tokens"] == 4
    assert summary["output_tokens_per_second"] == 8.0
    assert summary["input_tokens_per_second"] == 40.0
    assert summary["good_requests_per_second"] == 2.0
    assert summary["good_fraction"] == 0.25
    assert summary["ttft_ms"]["mean"] == pytest.approx(200.0)


def test_summary_of_nothing_has_no_distributions():
    summary = summarize([record(0.0, error="connect")], 0.0, Objectives())
    assert summary["ttft_ms"] is None
    assert summary["e2e_ms"] is None
    assert distribution_ms([]) is None
