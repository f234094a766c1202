"""A Prometheus in Kubernetes: by annotations it finds what the PodMonitor selects, and gives it the same labels."""

import json
import shutil
import subprocess

import pytest
import yaml

from tests.deploy.kubernetes.kustomize import ROOT, Rendered

pytestmark = pytest.mark.skipif(
    not (shutil.which("kubectl") and shutil.which("promtool")), reason="kubectl builds overlays, promtool relabels"
)


def meta(text):
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def discovered(rendered):
    """Return targets as Prometheus discovers pods: one for each port of each container of a running pod."""
    found = []
    for name in rendered.workloads:
        template = rendered.template(name)
        about = {
            "__meta_kubernetes_namespace": "mini-infer",
            "__meta_kubernetes_pod_name": f"{name}-0",
            "__meta_kubernetes_pod_phase": "Running",
        }
        for kind in ("label", "annotation"):
            for key, value in template["metadata"].get(f"{kind}s", {}).items():
                about[f"__meta_kubernetes_pod_{kind}_{meta(key)}"] = value
        for container in template["spec"]["containers"]:
            for port in container.get("ports", []):
                own = {
                    "__meta_kubernetes_pod_container_name": container["name"],
                    "__meta_kubernetes_pod_container_port_name": port["name"],
                }
                found.append({"targets": [f"192.0.2.7:{port['containerPort']}"], "labels": about | own})
    return found


def by_annotations(targets, folder):
    """Return labels of the targets that monitoring/prometheus.kubernetes.yml keeps, by promtool."""
    (folder / "targets.json").write_text(json.dumps(targets))
    config = yaml.safe_load((ROOT / "monitoring" / "prometheus.kubernetes.yml").read_text())
    (job,) = config["scrape_configs"]
    # Debian's promtool knows no discovery in Kubernetes: what that would find is given to it.
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    job["file_sd_configs"] = [{"files": [str(folder / "targets.json")]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    for seconds in (2, 10, 60):  # it waits for so long, and prints what it has read by then
        command = ["promtool", "check", "service-discovery", f"--timeout={seconds}s", str(path), job["job_name"]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
        if found := json.loads(done.stdout):  # those that are left out, too
            break
    kept = [each["labels"] for each in found if each["labels"]]
    return sorted(
        ({k: v for k, v in labels.items() if not k.startswith("__")} for labels in kept),
        key=lambda labels: labels["instance"] + labels["pod"],
    )


def by_pod_monitor(rendered):
    """Return labels that the Prometheus operator gives to the targets of the PodMonitor."""
    (monitor,) = rendered.of_kind("PodMonitor").values()
    endpoints = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    return sorted(
        (
            {
                "namespace": "mini-infer",
                "pod": f"{name}-0",
                "container": container["name"],
                "endpoint": port["name"],
                "job": rendered.labels(name)[monitor["spec"]["jobLabel"]],
                "instance": f"192.0.2.7:{port['containerPort']}",
            }
            for name in rendered.selected(monitor["spec"]["selector"]["matchLabels"])
            for container in rendered.pod(name)["containers"]
            for port in container.get("ports", [])
            if port["name"] in endpoints
        ),
        key=lambda labels: labels["instance"] + labels["pod"],
    )


@pytest.mark.parametrize(("variant", "num_targets"), [("everything", 4), ("one-pod", 3), ("gpu-groups", 3)])
def test_both_ways_of_scraping_find_the_same(variant, num_targets, tmp_path):
    rendered = Rendered(variant)
    found = by_annotations(discovered(rendered), tmp_path)
    assert len(found) == num_targets
    assert found == by_pod_monitor(rendered)


def test_other_peoples_pods_and_those_that_have_ended_are_left_out(tmp_path):
    phase, part = "__meta_kubernetes_pod_phase", "__meta_kubernetes_pod_label_app_kubernetes_io_part_of"
    targets = [
        target | {"labels": target["labels"] | {label: value}}
        for label, value in ((phase, "Succeeded"), (phase, "Pending"), (part, "something-else"))
        for target in discovered(Rendered("monitoring"))
    ]
    assert by_annotations(targets, tmp_path) == []
