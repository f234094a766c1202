"""The list of all metrics; others cannot be observed."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.metrics import SPECS, MetricSet, wing_specs

ALL_SPECS = (*SPECS, *wing_specs("worker"))


def test_names_are_unique_and_of_the_two_families() -> None:
    names = [spec.name for spec in ALL_SPECS]
    assert len(names) == len(set(names))
    assert all(name.startswith(("vllm:", "mini_infer_")) for name in names)
    assert all(bool(spec.buckets) == (spec.kind == "histogram") for spec in ALL_SPECS)
    assert all(list(spec.buckets) == sorted(set(spec.buckets)) for spec in ALL_SPECS)


def test_every_metric_can_be_made_and_shown() -> None:
    metrics = MetricSet({"model_name": "m"}, wings=wing_specs("worker"))
    for spec in ALL_SPECS:
        labels = dict.fromkeys(spec.labels, "x")
        getattr(metrics, spec.kind)(spec.name, **labels)
    text = metrics.render().decode()
    assert all(f"{spec.name}" in text for spec in ALL_SPECS)
    assert text.count('model_name="m"') > len(ALL_SPECS)


def test_sets_are_independent() -> None:
    first, second = MetricSet({"model_name": "m"}), MetricSet({})
    first.counter("vllm:prompt_tokens").inc(3)
    second.counter("vllm:prompt_tokens").inc(1)
    assert 'vllm:prompt_tokens_total{model_name="m"} 3.0' in first.render().decode()
    assert "vllm:prompt_tokens_total 1.0" in second.render().decode()


@pytest.mark.parametrize(
    ("kind", "name", "labels"),
    [
        ("gauge", "vllm:unheard_of", {}),
        ("gauge", "vllm:prompt_tokens", {}),
        ("counter", "vllm:request_success", {}),
        ("counter", "vllm:prompt_tokens", {"user": "x"}),
    ],
)
def test_what_is_not_listed_is_refused(kind: str, name: str, labels: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="see common/metrics"):
        getattr(MetricSet({}), kind)(name, **labels)


def test_a_step_histogram_counts_like_the_library() -> None:
    values = [0.0, 0.001, 0.0011, 0.02, 0.3, 99.0]
    fast, slow = MetricSet({"model_name": "m"}), MetricSet({"model_name": "m"})
    name = "vllm:inter_token_latency_seconds"
    step, plain = fast.step_histogram(name), slow.histogram(name)
    for value in values:
        step.observe(value)
        plain.observe(value)
    shown = [line for line in slow.render().decode().splitlines() if "_created" not in line]
    assert fast.render().decode().splitlines() == shown
    with pytest.raises(ConfigError):
        fast.step_histogram("vllm:unheard_of")


def test_sets_that_share_are_one_text() -> None:
    first = MetricSet({"model_name": "a"})
    second = MetricSet({"model_name": "b"}, first)
    for metrics, count in ((first, 1), (second, 2)):
        metrics.counter("vllm:prompt_tokens").inc(count)
        steps = metrics.step_histogram("vllm:inter_token_latency_seconds")
        for _ in range(count):
            steps.observe(0.001)
    text = second.render().decode()
    assert text == first.render().decode()
    families = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(set(families)) == len(families)  # a scrape with a name twice is refused as a whole
    for name in ("vllm:prompt_tokens_total", "vllm:inter_token_latency_seconds_count"):
        assert f'{name}{{model_name="a"}} 1.0' in text
        assert f'{name}{{model_name="b"}} 2.0' in text
