"""The kustomize base: valid documents, and names, ports, selectors and settings that fit together."""

import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.deploy.settings import VARIABLES, parse

BASE = Path(__file__).parents[2] / "k8s" / "base"
KUSTOMIZATION = yaml.safe_load((BASE / "kustomization.yaml").read_text())
DOCUMENTS = [
    document for name in KUSTOMIZATION["resources"] for document in yaml.safe_load_all((BASE / name).read_text())
]
WORKLOADS = {d["metadata"]["name"]: d for d in DOCUMENTS if "template" in d.get("spec", {})}
ROLES = {"router": "router", "prefill": "prefill_service", "decode": "decode_service", "kv-agent": "kvstore"}


def of_kind(kind):
    return {d["metadata"]["name"]: d for d in DOCUMENTS if d["kind"] == kind}


def pod(name):
    return WORKLOADS[name]["spec"]["template"]["spec"]


def container(name):
    (only,) = pod(name)["containers"]
    return only


def environment(name):
    """The container's variables, with placeholders for what only a running pod knows."""
    env = dict(of_kind("ConfigMap")["mini-infer"]["data"])
    secret = of_kind("Secret")["mini-infer"]["stringData"]
    for entry in container(name)["env"]:
        source = entry.get("valueFrom", {})
        if "secretKeyRef" in source:
            env[entry["name"]] = secret[source["secretKeyRef"]["key"]]
        else:
            env[entry["name"]] = entry.get("value", "from-the-pod")
    return env


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_every_document_is_valid(document):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_kustomization_lists_every_file():
    files = {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(KUSTOMIZATION["resources"]) == files
    assert {image["name"] for image in KUSTOMIZATION["images"]} == {
        c["image"] for name in WORKLOADS for c in [container(name), *pod(name).get("initContainers", [])]
    }


def test_all_roles_are_there():
    assert WORKLOADS.keys() == ROLES.keys()
    assert {name: container(name)["args"][0] for name in WORKLOADS} == ROLES


@pytest.mark.parametrize("name", ROLES)
def test_each_service_understands_its_flags_and_variables(name):
    settings = parse(container(name)["args"], environment(name))
    ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
    assert settings["port"] == ports["http" if name == "router" else "grpc"]
    assert settings["host"] == "0.0.0.0"
    assert settings["cluster_token"]
    if name != "router":
        assert settings["metrics_port"] == ports["metrics"]
    if name in ("prefill", "decode"):
        assert settings["agent_socket"] == environment("kv-agent")["MINI_INFER_SOCKET"]
        assert pod(name)["terminationGracePeriodSeconds"] > settings["drain_grace_seconds"] + 5


def test_no_variable_is_a_typing_error():
    for name in WORKLOADS:
        assert environment(name).keys() <= VARIABLES


def test_selectors_find_their_pods():
    for workload in WORKLOADS.values():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    found = {w["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] for w in WORKLOADS.values()}
    budgets = [b["spec"]["selector"]["matchLabels"] for b in of_kind("PodDisruptionBudget").values()]
    services = [s["spec"]["selector"] for s in of_kind("Service").values()]
    assert {selector["app.kubernetes.io/name"] for selector in budgets + services} <= found


def test_the_router_reaches_its_workers_through_headless_services():
    settings = parse(container("router")["args"], environment("router"))
    for role in ("prefill", "decode"):
        service = of_kind("Service")[role]
        assert service["spec"]["clusterIP"] == "None"
        assert settings[role] == f"{role}:{service['spec']['ports'][0]['port']}"
        assert WORKLOADS[role]["spec"]["serviceName"] == role


@pytest.mark.parametrize("name", ROLES)
def test_pods_run_with_the_least_rights(name):
    context = container(name)["securityContext"]
    assert context["runAsNonRoot"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert pod(name)["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert not pod(name)["automountServiceAccountToken"]


@pytest.mark.parametrize("name", ROLES)
def test_probes_name_ports_that_exist(name):
    ports = container(name)["ports"]
    for probe in ("readinessProbe", "livenessProbe"):
        definition = container(name)[probe]
        port = definition["httpGet"]["port"] if "httpGet" in definition else definition["grpc"]["port"]
        assert port in [p["name"] for p in ports] + [p["containerPort"] for p in ports]


def test_workers_of_a_node_and_its_agent_share_the_folder_of_sockets():
    def shared(name):
        (volume,) = [v for v in pod(name)["volumes"] if v["name"] == "sockets"]
        (mount,) = [m for m in container(name)["volumeMounts"] if m["name"] == "sockets"]
        return volume["hostPath"]["path"], mount["mountPath"]

    assert shared("prefill") == shared("decode") == shared("kv-agent")
    run_dir = environment("prefill")["MINI_INFER_RUN_DIR"]
    assert shared("prefill")[1] == run_dir


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl builds overlays")
def test_the_gpu_overlay_gives_every_worker_a_gpu_of_its_own():
    text = subprocess.run(
        ["kubectl", "kustomize", str(BASE.parent / "gpu")], capture_output=True, text=True, check=True
    ).stdout
    built = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(text)}
    assert built.keys() == {(d["kind"], d["metadata"]["name"]) for d in DOCUMENTS}
    for document in built.values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    config = built["ConfigMap", "mini-infer"]["data"]
    for name in ("prefill", "decode"):
        spec = built["StatefulSet", name]["spec"]["template"]["spec"]
        (only,) = spec["containers"]
        assert only["image"] == "mini-infer:cuda"
        assert only["resources"]["limits"]["nvidia.com/gpu"] == "1"
        settings = parse(only["args"], environment(name) | config)
        assert (settings["kv_cache_gb"], settings["gpu_memory_fraction"]) == (0, 0.9)
        mounts = {mount["name"]: mount["mountPath"] for mount in only["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}
        assert mounts["kernels"] in (BASE.parents[1] / "Dockerfile").read_text()
