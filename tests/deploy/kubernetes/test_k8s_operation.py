"""k8s/ as it is operated: grace periods, permissions, resources, and the promises of each component."""

import re
import shutil
from decimal import Decimal

import pytest

from router.config import RouterConfig
from router.http.body import MAX_BODY_BYTES
from tests.deploy.kubernetes.kustomize import ROOT, VARIANTS, Rendered
from tests.deploy.settings import parse

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl builds overlays")
PACKAGES = ("router", "prefill_service", "decode_service", "kvstore", "common")
REQUEST_SECONDS = RouterConfig(decode="a:1").request_timeout_seconds
UNITS = {"": Decimal(1), "s": Decimal(1), "m": Decimal("0.001"), "Mi": Decimal(2**20), "Gi": Decimal(2**30)}


@pytest.fixture(params=VARIANTS)
def rendered(request):
    return Rendered(request.param)


def quantity(text):
    number, unit = re.findall(r"^(\d+)([A-Za-z]*)$", str(text))[0]
    return Decimal(number) * UNITS[unit]


def pre_stop_seconds(container):
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"  # `sleep` as an action of its own came with 1.30
    return int(command[1])


# -- times ----------------------------------------------------------------------------------------------------------


def test_grace_periods_cover_what_is_done_in_them(rendered):
    for name, container in rendered.services():
        settings = parse(rendered.arguments(container), rendered.environment(container))
        before = pre_stop_seconds(container) if "lifecycle" in container else 0
        assert rendered.pod(name)["terminationGracePeriodSeconds"] >= before + settings["drain_grace_seconds"] + 5
        if name == "router":
            assert settings["drain_grace_seconds"] >= settings["request_timeout_seconds"]
        if name != "kv-agent":
            assert before >= 5


def test_gateways_wait_as_long_as_requests_may_take(rendered):
    for ingress in rendered.of_kind("Ingress").values():
        notes = {key.rpartition("/")[2]: value for key, value in ingress["metadata"]["annotations"].items()}
        assert min(int(notes["proxy-read-timeout"]), int(notes["proxy-send-timeout"])) > REQUEST_SECONDS
        assert notes["proxy-buffering"] == "off"
        assert notes["proxy-body-size"] == f"{MAX_BODY_BYTES >> 20}m"
        (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
        assert path["backend"]["service"] == {"name": "router", "port": {"name": "http"}}
    for route in rendered.of_kind("HTTPRoute").values():
        for rule in route["spec"]["rules"]:
            assert min(quantity(seconds) for seconds in rule["timeouts"].values()) > REQUEST_SECONDS
            (backend,) = rule["backendRefs"]
            assert backend["name"] in rendered.of_kind(backend.get("kind", "Service"))


def test_scaling_down_waits_for_the_drain_of_one_pod(rendered):
    for scaler in rendered.of_kind("HorizontalPodAutoscaler", "ScaledObject").values():
        spec = scaler["spec"]
        target = spec["scaleTargetRef"]
        assert "replicas" not in rendered.of_kind(target["kind"])[target["name"]]["spec"]
        advanced = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", spec)
        down = advanced["behavior"]["scaleDown"]
        (policy,) = down["policies"]
        assert (policy["type"], policy["value"]) == ("Pods", 1)
        if target["name"] != "router":  # whose idle pods end at once
            assert policy["periodSeconds"] > rendered.pod(target["name"])["terminationGracePeriodSeconds"]


# -- rights and room ------------------------------------------------------------------------------------------------


def test_services_run_with_the_least_rights(rendered):
    for name, container in rendered.containers():
        pod, own = rendered.pod(name), container["securityContext"]
        assert own["readOnlyRootFilesystem"]
        assert not own["allowPrivilegeEscalation"]
        assert own["capabilities"]["drop"] == ["ALL"]
        assert not pod["automountServiceAccountToken"]
        assert (pod["securityContext"] | own)["seccompProfile"] == {"type": "RuntimeDefault"}
        if container["name"] != "own-sockets":
            context = pod["securityContext"] | own
            assert context["runAsNonRoot"]
            assert context["runAsUser"] == 10001
            assert "add" not in own["capabilities"]
        assert "memory" in container["resources"]["limits"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    (namespace,) = rendered.of_kind("Namespace").values()  # under this level test_kubelet.py starts pods
    labels = namespace["metadata"]["labels"]
    levels = {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "warn", "audit")}
    assert levels == {"privileged" if "kv-agent" in rendered.workloads else "restricted"}


def test_one_image_of_one_kind(rendered):
    images = {container["image"] for _, container in rendered.containers()}
    assert len(images) == 1
    assert images <= {"mini-infer:cpu", "mini-infer:cuda"}


def test_containers_start_the_image_as_it_is_made(rendered):
    image = (ROOT / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["python", "-m"]' in image
    assert "useradd --uid 10001 " in image
    for name, container in rendered.containers():
        user = container["securityContext"].get("runAsUser", rendered.pod(name)["securityContext"].get("runAsUser"))
        if container["name"] == "own-sockets":
            assert (user, container["command"][0]) == (0, "sh")
        else:
            assert (user, container["args"][0].partition(".")[0] in PACKAGES) == (10001, True)
            assert "command" not in container


def test_the_small_overlay_asks_for_what_it_says():
    rendered = Rendered("small")
    asked = [c["resources"]["requests"] for _, c in rendered.containers()]
    assert {w["spec"]["replicas"] for w in rendered.workloads.values()} == {1}
    cpus, memory = (sum(quantity(each[name]) for each in asked) for name in ("cpu", "memory"))
    said = (ROOT / "k8s" / "small" / "kustomization.yaml").read_text()
    assert f"{cpus.normalize()} CPUs and {memory / 2**30} GiB asked for" in said


def test_limits_have_room_for_what_is_measured(rendered):
    """On a CPU, a worker takes 0.76 GB when it is ready. A decode worker's dense copy of KV has at most twice the
    size of its blocks. The host tier is charged to the worker that writes it."""
    gib, tier = Decimal(2**30), Decimal(0)
    settings = {c["name"]: parse(rendered.arguments(c), rendered.environment(c)) for _, c in rendered.services()}
    if "kv-agent" in settings:
        tier = Decimal(settings["kv-agent"]["host_tier_gb"]) * gib
        (agent,) = rendered.pod("kv-agent")["containers"]
        assert quantity(agent["resources"]["requests"]["memory"]) > tier
    for name, container in rendered.services():
        blocks = Decimal(settings[container["name"]].get("kv_cache_gb", 0)) * 10**9
        if blocks:
            copies = 3 if container["args"][0] == "decode_service" else 1
            resources = container["resources"]
            needed = Decimal("0.76") * 10**9 + blocks * copies
            assert quantity(resources["requests"]["memory"]) > needed * Decimal("0.9"), name
            assert quantity(resources["limits"]["memory"]) > needed + tier, name


def test_workers_with_gpus_get_what_kernels_and_ranks_need():
    for variant, count in (("gpu", 1), ("gpu-multinode", 8), ("gpu-groups-cached", 8)):
        rendered = Rendered(variant)
        workers = [(name, c) for name, c in rendered.services() if "service" in c["args"][0]]
        assert len(workers) == 2
        for name, container in workers:
            settings = parse(rendered.arguments(container), rendered.environment(container))
            assert container["resources"]["limits"]["nvidia.com/gpu"] == str(count)
            assert (settings["tp"], settings["kv_cache_gb"], settings["gpu_memory_fraction"]) == (count, 0, 0.9)
            assert "nvidia.com/gpu" in [t["key"] for t in rendered.pod(name)["tolerations"]]
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts["kernels"] in (ROOT / "Dockerfile").read_text()


def test_workers_of_a_node_and_its_agent_share_a_folder_of_their_namespace():
    for variant in ("node-agent", "gpu-node"):
        rendered = Rendered(variant)
        seen = set()
        for name, container in rendered.containers():
            for mount in container.get("volumeMounts", []):
                if mount["name"] == "sockets":
                    (path,) = [v["hostPath"]["path"] for v in rendered.pod(name)["volumes"] if v["name"] == "sockets"]
                    seen.add((path, mount["mountPath"], mount["subPathExpr"]))
                    (entry,) = [e for e in container["env"] if e["name"] == "NAMESPACE"]
                    assert entry["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
        assert seen == {("/run/mini-infer", "/run/mini-infer", "$(NAMESPACE)")}
        settings = {name: parse(rendered.arguments(c), rendered.environment(c)) for name, c in rendered.services()}
        for role in ("prefill", "decode"):
            assert settings[role]["agent_socket"] == settings["kv-agent"]["socket"] == "/run/mini-infer/agent.sock"
            assert settings[role]["run_dir"] == "/run/mini-infer"
            (wait,) = [c for c in rendered.pod(role)["initContainers"] if c["name"] == "wait-for-agent"]
            assert wait["args"][1] == settings[role]["agent_socket"]
            tolerated = rendered.pod(role).get("tolerations", [])
            assert all(toleration in rendered.pod("kv-agent")["tolerations"] for toleration in tolerated)


def test_workers_of_one_pod_tell_each_other_apart():
    rendered = Rendered("shared-pod")
    found = [
        parse(rendered.arguments(c), rendered.environment(c)) for name, c in rendered.services() if name == "worker"
    ]
    assert len(found) == 2
    for field in ("worker_id", "port", "metrics_port"):
        assert len({settings[field] for settings in found}) == 2
    assert {settings["run_dir"] for settings in found} == {"/run/mini-infer/sockets"}  # below the emptyDir


def test_the_model_that_is_downloaded_is_the_one_that_is_served():
    for variant in ("model-cache", "everything", "one-pod", "gpu-node", "gpu-groups-cached"):
        rendered = Rendered(variant)
        (download,) = rendered.pod("model-download")["containers"]
        _, hub_id, folder = download["args"]
        assert folder == f"/models/{hub_id.partition('/')[2]}"
        for name, container in rendered.services():
            if name != "kv-agent":
                assert parse(rendered.arguments(container), rendered.environment(container))["model"] == folder
                (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/models"]
                assert mount["readOnly"]
                (wait,) = [c for c in rendered.pod(name)["initContainers"] if c["name"] == "wait-for-model"]
                assert rendered.arguments(wait)[1] == folder


def test_priority_classes_exist_and_routers_go_last():
    rendered = Rendered("everything")
    values = {name: document["value"] for name, document in rendered.of_kind("PriorityClass").items()}
    names = rendered.workloads.keys() - {"model-download"}
    given = {name: values[rendered.pod(name)["priorityClassName"]] for name in names}
    assert given["router"] > given["decode"] == given["kv-agent"] > given["prefill"]


def test_network_policies_let_in_whom_they_should_and_nobody_else():
    for variant in ("everything", "one-pod", "gpu-groups"):
        rendered = Rendered(variant)
        policies = [document["spec"] for document in rendered.of_kind("NetworkPolicy").values()]

        def allowed(name, policies=policies, rendered=rendered):
            rules = [
                rule
                for policy in policies
                if policy["podSelector"]["matchLabels"].items() <= rendered.labels(name).items()
                for rule in policy["ingress"]
            ]
            return {
                (str(rule.get("from", "all")), port["port"])
                for rule in rules
                for port in rule.get("ports", [{"port": "all"}])
            }

        monitoring = str([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}])
        label = "app.kubernetes.io/component"
        router, worker = (str([{"podSelector": {"matchLabels": {label: name}}}]) for name in ("router", "worker"))
        metrics = {(monitoring, "metrics"), (monitoring, "metrics-decode")}
        for name in rendered.workloads:
            component = rendered.labels(name).get(label, "")
            further = {
                "router": {("all", "http")},
                "worker": {(router, "grpc"), (router, "grpc-decode"), (worker, "all")},
            }.get(component, set())
            assert allowed(name) == metrics | further
        named = {port["name"] for _, c in rendered.services() for port in c["ports"]}
        assert named <= {"http", "grpc", "grpc-decode", "metrics", "metrics-decode"}
