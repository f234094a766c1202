"""k8s/ on a real API server, with controllers and scheduler: `make test-k8s`."""

import json

import pytest
import yaml

from tests.deploy.kubernetes.control_plane import ControlPlane, is_available
from tests.deploy.kubernetes.custom_resources import definitions
from tests.deploy.kubernetes.kustomize import VARIANTS, Rendered, build, pod_template

pytestmark = [
    pytest.mark.k8s,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not is_available(), reason="KUBEBUILDER_ASSETS, or shared/kubernetes/kube.xz and etcd"),
]
APPLY = ["apply", "--server-side", "--validate=strict", "--filename=-"]


@pytest.fixture(scope="module")
def plane():
    with ControlPlane() as found:
        found.kubectl(*APPLY, stdin=yaml.safe_dump_all(definitions()))
        found.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=100s")
        yield found


@pytest.fixture
def controlled(plane):
    if not plane.has_controllers:
        pytest.skip("kube-controller-manager and kube-scheduler are not there")
    return plane


@pytest.fixture
def nodes(controlled):
    """Make nodes of a size, without a kubelet: what is scheduled there stays Pending, which is enough here."""
    # Those of namespaces that are going would take the room, and keep it: no kubelet ends them.
    controlled.wait_until("pods of other tests are gone", lambda: not controlled.get("pods", "-A")["items"])
    made = []

    def make(name, cpus, memory, gpus=0):
        taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}] if gpus else []
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        metadata = {"name": name, "labels": labels}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": taints}}
        controlled.kubectl("create", "--filename=-", stdin=json.dumps(node))
        made.append(name)
        room = {"cpu": str(cpus), "memory": memory, "pods": "110"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
        conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "so it says"}]
        status = {"status": {"capacity": room, "allocatable": room, "conditions": conditions}}
        patch = ["patch", "node", name, "--type=merge"]
        controlled.kubectl(*patch, "--subresource=status", f"--patch={json.dumps(status)}")
        # The API server taints new nodes until something says that they are ready; here nothing does.
        controlled.kubectl(*patch, f"--patch={json.dumps({'spec': {'taints': taints}})}")

    yield make
    for name in made:
        controlled.kubectl("delete", "node", name)


@pytest.fixture
def installed(controlled):
    """Install variants in namespaces of their own; gone after the test, so that the scheduler has room."""
    made = []

    def install(variant, namespace, without=""):
        made.append(namespace)
        documents = [d for d in yaml.safe_load_all(build(variant, namespace)) if d["kind"] != without]
        controlled.kubectl(*APPLY, stdin=yaml.safe_dump_all(documents))

    yield install
    for namespace in made:
        controlled.kubectl("delete", "namespace", namespace, "--wait=false")
        force = ["--grace-period=0", "--force", "--wait=false"]  # no kubelet would end them
        controlled.kubectl("delete", "pods", "--all", f"--namespace={namespace}", *force)


def pods(plane, namespace, **labels):
    selector = ",".join(f"app.kubernetes.io/{key}={value}" for key, value in labels.items())
    return plane.get("pods", f"--namespace={namespace}", f"--selector={selector}")["items"]


def is_scheduled(pod):
    return any(c["type"] == "PodScheduled" and c["status"] == "True" for c in pod["status"].get("conditions", []))


# -- what the API server accepts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_is_accepted_and_made_in_two_namespaces(plane, variant):
    for namespace in (f"{variant}-a", f"{variant}-b"):
        text = build(variant, namespace)
        documents = list(yaml.safe_load_all(text))
        if namespace.endswith("-a"):
            plane.kubectl("create", "namespace", namespace)  # a dry run makes none
            assert len(plane.kubectl(*APPLY, "--dry-run=server", stdin=text).splitlines()) == len(documents)
        assert len(plane.kubectl(*APPLY, stdin=text).splitlines()) == len(documents)
        assert len(plane.get("--filename=-", stdin=text)["items"]) == len(documents)
    plane.kubectl("delete", "namespace", f"{variant}-a", f"{variant}-b", "--wait=false")


@pytest.mark.parametrize("variant", VARIANTS)
def test_pod_security_admits_every_pod(plane, variant):
    rendered = Rendered(variant)
    namespace = f"admission-{variant}"
    (own,) = rendered.of_kind("Namespace").values()
    own["metadata"]["name"] = namespace
    levels = {
        own["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "warn", "audit")
    }
    needs_host = "kv-agent" in rendered.workloads
    assert levels == {"privileged" if needs_host else "restricted"}
    plane.kubectl(*APPLY, stdin=yaml.safe_dump(own))
    if not plane.has_controllers:  # one of which makes it
        plane.kubectl("create", "serviceaccount", "default", f"-n={namespace}")
    plane.wait_until("the namespace has its account", lambda: plane.get("sa", f"-n={namespace}")["items"])
    for name, workload in rendered.workloads.items():
        plane.kubectl("create", "--dry-run=server", "--filename=-", stdin=pod_of(name, workload, namespace))
    if needs_host:  # and not one level lower
        plane.kubectl("label", "--overwrite", "namespace", namespace, "pod-security.kubernetes.io/enforce=baseline")
        workload = rendered.workloads["kv-agent"]
        refusal = plane.kubectl("create", "--filename=-", stdin=pod_of("kv-agent", workload, namespace), fails=True)
        assert 'violates PodSecurity "baseline' in refusal
        assert "hostPath" in refusal
    plane.kubectl("delete", "namespace", namespace, "--wait=false")


def pod_of(name, workload, namespace):
    """Make a pod as the workload's controller would."""
    template = pod_template(workload)
    assert template
    metadata = template["metadata"] | {"name": name, "namespace": namespace}
    spec = template["spec"].copy()
    spec.pop("priorityClassName", None)  # its class is another document
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


# -- what controllers and scheduler make of it ----------------------------------------------------------------------


def test_the_small_overlay_fits_a_node_of_four_cpus(controlled, nodes, installed):
    nodes("kind", 4, "8Gi")
    installed("small", "small")
    controlled.wait_until(
        "three pods have a node",
        lambda: [is_scheduled(p) for p in pods(controlled, "small", **{"part-of": "mini-infer"})] == [True] * 3,
    )


def test_workers_take_nodes_with_gpus_and_an_agent_and_others_stay_away(controlled, nodes, installed):
    nodes("gpu-0", 16, "64Gi", gpus=2)
    nodes("plain", 16, "64Gi")
    controlled.offer_volume("shared", nfs={"server": "192.0.2.3", "path": "/models"})
    installed("gpu-node", "chat")
    workers = {"component": "worker"}
    controlled.wait_until(
        "a worker of each role has a node",
        lambda: [is_scheduled(p) for p in pods(controlled, "chat", **workers)] == [True] * 2,
    )
    assert {p["spec"]["nodeName"] for p in pods(controlled, "chat", **workers)} == {"gpu-0"}
    agents = pods(controlled, "chat", name="kv-agent")
    assert {p["spec"]["nodeName"] for p in agents} == {"gpu-0", "plain"}
    assert {p["spec"]["priority"] for p in agents} == {900_000}


def test_a_worker_without_an_agent_says_what_it_waits_for(controlled, nodes, installed):
    nodes("other", 16, "64Gi")
    installed("node-agent", "lonely", without="DaemonSet")

    def messages():
        conditions = [pod["status"].get("conditions", []) for pod in pods(controlled, "lonely", component="worker")]
        return [condition.get("message", "") for each in conditions for condition in each]

    controlled.wait_until(
        "the scheduler names the rule", lambda: "didn't match pod affinity rules" in " ".join(messages())
    )


def test_a_changed_setting_rolls_the_pods(controlled, installed):
    installed("small", "rolling")
    text = build("small", "rolling")

    def found():
        return controlled.get("statefulset", "decode", "-n=rolling")

    def revision():
        return found().get("status", {}).get("updateRevision", "")

    controlled.wait_until("the set has a revision", revision)
    before, generation = revision(), found()["metadata"]["generation"]
    documents = list(yaml.safe_load_all(text))
    controlled.kubectl(*APPLY, stdin=text)
    assert found()["metadata"]["generation"] == generation  # the same again changes nothing
    changed = build("small", "rolling", {"MINI_INFER_KV_CACHE_GB": "0.25"})
    assert len(list(yaml.safe_load_all(changed))) == len(documents)
    controlled.kubectl(*APPLY, stdin=changed)
    controlled.wait_until("the set has another revision", lambda: revision() not in ("", before))


def test_autoscalers_find_what_they_scale(controlled, installed):
    installed("autoscaling", "scaled")
    for kind, name in (("deployment", "router"), ("statefulset", "prefill"), ("statefulset", "decode")):
        controlled.wait_until(
            f"{name} has its least number of replicas",
            lambda kind=kind, name=name: controlled.get(kind, name, "-n=scaled")["spec"]["replicas"] == 2,
        )


def test_one_pod_of_a_role_is_evicted_at_a_time(controlled, nodes, installed):
    nodes("big", 16, "64Gi")
    installed("base", "evicted")
    for role in ("router", "prefill", "decode"):
        controlled.wait_until(
            "two pods have a node",
            lambda role=role: [is_scheduled(p) for p in pods(controlled, "evicted", name=role)] == [True] * 2,
        )
        names = [pod["metadata"]["name"] for pod in pods(controlled, "evicted", name=role)]
        ready = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
        for name in names:
            patch = f"--patch={json.dumps(ready)}"
            controlled.kubectl("patch", "pod", name, "-n=evicted", "--subresource=status", patch)
        controlled.wait_until(
            "the budget allows one disruption", lambda role=role: controlled.may_be_evicted("evicted", role)
        )
        controlled.evict("evicted", names[0])
        assert "disruption budget" in controlled.evict("evicted", names[1], fails=True)
