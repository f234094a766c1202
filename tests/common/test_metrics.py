"""One list of metrics; what is not in it cannot be observed."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.metrics import SPECS, MetricSet


def test_names_are_unique_and_of_the_two_families() -> None:
    names = [spec.name for spec in SPECS]
    assert len(names) == len(set(names))
    assert all(name.startswith(("vllm:", "mini_infer_")) for name in names)
    assert all(bool(spec.buckets) == (spec.kind == "histogram") for spec in SPECS)
    assert all(list(spec.buckets) == sorted(set(spec.buckets)) for spec in SPECS)


def test_every_metric_can_be_made_and_shown() -> None:
    metrics = MetricSet({"model_name": "m"})
    for spec in SPECS:
        labels = dict.fromkeys(spec.labels, "x")
        getattr(metrics, spec.kind)(spec.name, **labels)
    text = metrics.render().decode()
    assert all(f"{spec.name}" in text for spec in SPECS)
    assert text.count('model_name="m"') > len(SPECS)


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
