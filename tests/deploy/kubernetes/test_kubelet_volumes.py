"""Volumes of k8s/ on a real kubelet: sockets in a hostPath and in an emptyDir, a model in a claim."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from cli.cluster.ports import free_ports
from tests.cluster.test_served_models import save_tiny_model
from tests.common.fake_hub import FakeHub
from tests.deploy.installation import installed, is_ready, restarts
from tests.deploy.kubernetes.kubelet_node import why_not

pytestmark = [pytest.mark.kubelet, pytest.mark.timeout(900), pytest.mark.skipif(bool(why_not()), reason=why_not())]
PROMPT = "a prompt that is long enough for a prefill worker to compute it " * 12


def test_pods_of_a_node_share_memory_through_the_folder_of_their_namespace(node):
    with installed(node, "node-agent", "here") as here, installed(node, "node-agent", "there") as there:
        for each in (here, there):
            each.wait_ready(4)
            assert each.stream(PROMPT, 8)
            assert each.transports() == {"shm"}
            folder = f"/run/mini-infer/{each.namespace}"
            assert node.host("stat", "--format=%u:%g %a", folder).strip() == "10001:10001 700"
            sockets = set(node.host("find", folder, "-type", "s", "-printf", "%f %U %m\\n").splitlines())
            assert {line.split()[0] for line in sockets} >= {"agent.sock", "prefill-0.kv.sock", "decode-0.kv.sock"}
            assert {line.split()[1] for line in sockets} == {"10001"}

        # Workers go on without their agent, and find the next one when they start again.
        before = here.pod("kv-agent")["metadata"]["uid"]
        here.kubectl("rollout", "restart", "daemonset/kv-agent")

        def is_new():
            return any(is_ready(p) and p["metadata"]["uid"] != before for p in here.pods("kv-agent"))

        here.wait_until("another agent is ready", is_new)
        assert here.stream(PROMPT, 8)
        here.kubectl("delete", "pod", "decode-0", "prefill-0")
        here.wait_ready(4)
        assert here.stream(PROMPT, 8)
        assert here.transports() == {"shm"}


def test_workers_of_a_pod_share_memory_through_its_emptydir(node):
    with installed(node, "shared-pod", "pair") as pair:
        pair.kubectl("scale", "statefulset/worker", "--replicas=1")
        pair.wait_ready(2)
        assert pair.stream(PROMPT, 8)
        assert pair.transports("worker", 9101) == {"shm"}
        look = """
import os, stat
for path in ("/run/mini-infer", "/run/mini-infer/sockets"):
    found = os.stat(path)
    print(path, found.st_uid, found.st_gid, oct(stat.S_IMODE(found.st_mode)))
"""
        assert pair.python("worker", look).splitlines() == [
            "/run/mini-infer 0 10001 0o2777",
            "/run/mini-infer/sockets 10001 10001 0o2700",
        ]


def test_services_wait_for_the_model_that_a_job_downloads(node, tmp_path):
    volume = node.folder / "models"
    volume.mkdir()
    volume.chmod(0o777)  # as provisioners of folders do
    node.plane.offer_volume("models", hostPath={"path": str(volume)})
    (port,) = free_ports(1)
    job = [
        {"op": "replace", "path": "/spec/template/spec/containers/0/args/1", "value": "org/tiny"},
        {"op": "replace", "path": "/spec/template/spec/containers/0/args/2", "value": "/models/tiny"},
        {
            "op": "add",
            "path": "/spec/template/spec/containers/0/env/-",
            "value": {"name": "HF_ENDPOINT", "value": f"http://{node.address}:{port}"},
        },
    ]
    model = {"op": "replace", "path": "/data/MINI_INFER_MODEL", "value": "/models/tiny"}
    patches = [
        {"target": {"kind": "Job"}, "patch": json.dumps(job)},
        {"target": {"kind": "ConfigMap"}, "patch": json.dumps([model])},
    ]
    with installed(node, "model-cache", "cached", patches=patches) as cached:

        def failed():
            return any(restarts(pod) for pod in cached.pods("model-download"))

        cached.wait_until("the download has failed", failed)
        for pod in cached.pods("router", "prefill", "decode"):
            (wait,) = pod["status"]["initContainerStatuses"]
            assert "running" in wait["state"]
        hub = FakeHub("org/tiny", save_tiny_model(tmp_path / "tiny"), node.address, port)
        serving = threading.Thread(target=hub.serve_forever)
        serving.start()
        try:
            cached.wait_ready(3)
        finally:
            hub.shutdown()
            serving.join()
            hub.server_close()
        assert (volume / "tiny" / "config.json").stat().st_uid == 10001
        models = httpx.get(f"{cached.url()}/v1/models", timeout=10).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        assert cached.stream("once upon a time", 8)
        assert "/models/tiny: no such file" in cached.kubectl("logs", "decode-0", "--container=wait-for-model")
