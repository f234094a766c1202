"""Queries of autoscalers to Prometheus: series that workers export, and the values that come back."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from common.metrics import SPECS, wing_specs
from tests.deploy.kubernetes.kustomize import ROOT, Rendered

ADAPTER = yaml.safe_load((ROOT / "k8s" / "components" / "autoscaling" / "adapter-values.yaml").read_text())
RULES = {rule["name"]["as"]: rule for rule in ADAPTER["rules"]["custom"]}
# (pod, requests that wait, share of its KV blocks in use)
PODS = [("prefill-0", 6, 0.1), ("prefill-1", 0, 0.3), ("decode-0", 3, 0.7), ("decode-1", 1, 0.95)]
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl builds overlays")
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="Prometheus' own evaluation")


def triggers():
    objects = Rendered("autoscaling-keda").of_kind("ScaledObject")
    return {name: [t["metadata"] for t in found["spec"]["triggers"]] for name, found in objects.items()}


def evaluate(folder, queries):
    """Let Prometheus evaluate {query: {labels: value}} on the series of PODS; fails with what it found instead."""
    series = [
        {
            "series": f'{name}{{namespace="mini-infer",pod="{pod}",model_name="m",instance="{pod}:9100"}}',
            "values": value,
        }
        for pod, waiting, usage in PODS
        for name, value in (("vllm:num_requests_waiting", f"{waiting}x3"), ("vllm:kv_cache_usage_perc", f"{usage}x3"))
    ]
    tests = [
        {
            "expr": query,
            "eval_time": "1m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in expected.items()],
        }
        for query, expected in queries.items()
    ]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    path = folder / "test.yml"
    path.write_text(json.dumps({"rule_files": [], "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_kubectl
def test_autoscalers_ask_for_what_the_adapter_offers():
    asked = {
        metric["pods"]["metric"]["name"]
        for scaler in Rendered("autoscaling").of_kind("HorizontalPodAutoscaler").values()
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    assert asked == RULES.keys()


@needs_kubectl
def test_series_are_exported():
    exported = {spec.name for spec in (*SPECS, *wing_specs("worker")) if spec.kind == "gauge"}
    queries = [rule["seriesQuery"] for rule in RULES.values()] + [
        t["query"] for ts in triggers().values() for t in ts
    ]
    named = {name for query in queries for name in re.findall(r"(?:vllm:|mini_infer_)\w+", query)}
    assert len(named) == 2
    assert named <= exported


@needs_promtool
def test_the_adapter_gets_one_value_a_pod(tmp_path):
    def query(name):
        rule = RULES[name]
        series = rule["seriesQuery"].partition("{")[0]
        filled = rule["metricsQuery"].replace("<<.Series>>", series).replace("<<.GroupBy>>", "pod")
        return filled.replace("<<.LabelMatchers>>", 'namespace="mini-infer",pod=~"decode-0|decode-1"')

    expected = {
        query("mini_infer_requests_waiting"): {'{pod="decode-0"}': 3, '{pod="decode-1"}': 1},
        query("mini_infer_kv_cache_usage"): {'{pod="decode-0"}': 0.7, '{pod="decode-1"}': 0.95},
    }
    evaluate(tmp_path, expected)


@needs_kubectl
@needs_promtool
def test_keda_gets_the_sum_of_a_role(tmp_path):
    found = triggers()
    (prefill,) = found["prefill"]
    waiting, usage = found["decode"]
    evaluate(tmp_path, {prefill["query"]: {"{}": 6}, waiting["query"]: {"{}": 4}, usage["query"]: {"{}": 1.65}})
    # Of two decode workers, 1.65 / 2 is above the threshold: there would be a third.
    assert float(usage["threshold"]) < 1.65 / 2
    assert {t["serverAddress"] for ts in found.values() for t in ts} == {ADAPTER["prometheus"]["url"] + ":9090"}
