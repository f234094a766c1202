"""k8s/ as kubectl builds it: valid for every version of Kubernetes; settings, names and ports fit the code."""

import importlib.util
import json
import re
import shutil

import jsonschema
import kubernetes_validate
import pytest
import yaml

from common.errors import ConfigError
from router.http.routes import OPEN_PATHS
from tests.deploy.kubernetes.custom_resources import SPECS
from tests.deploy.kubernetes.kustomize import (
    COMPONENTS,
    EXAMPLE,
    ROOT,
    VARIANTS,
    Rendered,
    build_own,
    copy_with_secret,
    pod_template,
    unknown_variables,
)  # fmt: skip
from tests.deploy.settings import parse

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl builds overlays")
VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
ENDS = (VERSIONS[0], VERSIONS[-1])


@pytest.fixture(params=VARIANTS)
def rendered(request):
    return Rendered(request.param)


def closed(schema):
    """Return the schema without additional properties anywhere, as an API server reads it in strict validation."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return inner | {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else inner


# -- schemas --------------------------------------------------------------------------------------------------------


# A field that came later is unknown to the oldest version, one that has gone to the newest.
@pytest.mark.parametrize("version", [v if v in ENDS else pytest.param(v, marks=pytest.mark.soak) for v in VERSIONS])
def test_every_document_is_valid(version):
    documents = {json.dumps(d, sort_keys=True): d for variant in VARIANTS for d in Rendered(variant).documents}
    for document in documents.values():
        custom = SPECS.get((document["apiVersion"], document["kind"]))
        if custom:
            jsonschema.validate(document["spec"], closed(custom))
            if template := pod_template(document):
                pod = {"apiVersion": "v1", "kind": "Pod", **template}
                kubernetes_validate.validate(pod, version, strict=True)
        else:
            kubernetes_validate.validate(document, version, strict=True)


def test_every_component_is_tested():
    used = {name for parts in VARIANTS.values() for name in parts}
    assert set(COMPONENTS) <= used


def test_documents_are_in_one_namespace(rendered):
    cluster_wide = {"Namespace", "PriorityClass"}
    for document in rendered.documents:
        expected = None if document["kind"] in cluster_wide else "mini-infer"
        assert document["metadata"].get("namespace") == expected
    assert rendered.of_kind("Namespace").keys() == {"mini-infer"}


# -- settings -------------------------------------------------------------------------------------------------------


def test_each_service_understands_its_flags_and_variables(rendered):
    for name, container in rendered.services():
        env = rendered.environment(container)
        assert not unknown_variables(env)
        settings = parse(rendered.arguments(container), env)
        ports = {port["name"].partition("-")[0]: port["containerPort"] for port in container["ports"]}
        assert settings["host"] == "0.0.0.0"
        assert settings["cluster_token"]
        assert settings["port"] == ports["http" if name == "router" else "grpc"]
        assert settings["metrics_port"] == ports["metrics"]
        if "worker_id" in settings:
            assert settings["worker_id"]
            assert settings["advertise_host"] == "from-the-pod"


def test_what_only_prepares_understands_its_arguments(rendered):
    for _, container in rendered.containers():
        module, *argv = rendered.arguments(container) if "args" in container else [""]
        if module.startswith("common."):
            spec = importlib.util.find_spec(module)
            assert spec is not None
            found = f"{module}.__main__" if spec.submodule_search_locations else module
            importlib.import_module(found).build_parser().parse_args(argv)


def test_names_of_settings_and_secrets_change_with_their_values(rendered):
    for kind in ("ConfigMap", "Secret"):
        for name in rendered.of_kind(kind):
            assert re.fullmatch(r"mini-infer-[a-z0-9]{10}", name)


def test_every_overlay_brings_a_secret_of_ones_own_and_nothing_starts_with_the_examples():
    def token(variant):
        (secret,) = Rendered(variant).of_kind("Secret").values()
        return secret["data"]["cluster-token"]

    assert len({token(name) for name in VARIANTS}) == 1
    assert token("small") != token(EXAMPLE)
    rendered = Rendered(EXAMPLE)
    for _, container in rendered.services():
        with pytest.raises(ConfigError, match="the cluster token is the example's"):
            parse(rendered.arguments(container), rendered.environment(container))
    assert (ROOT / "k8s" / "components" / "secret" / ".gitignore").read_text() == "secret.env\n"


# -- names and ports ------------------------------------------------------------------------------------------------


def test_selectors_find_their_pods(rendered):
    for name, workload in rendered.workloads.items():
        if "selector" in workload["spec"]:
            assert rendered.selected(workload["spec"]["selector"]["matchLabels"]) == [name]
        for constraint in rendered.pod(name).get("topologySpreadConstraints", []):
            assert rendered.selected(constraint["labelSelector"]["matchLabels"]) == [name]
    for document in rendered.of_kind("PodDisruptionBudget", "InferencePool", "PodMonitor").values():
        assert rendered.selected(document["spec"]["selector"]["matchLabels"])
    for service in rendered.of_kind("Service").values():
        assert len(rendered.selected(service["spec"]["selector"])) == 1


def test_each_kind_of_pod_that_serves_has_one_budget(rendered):
    budgets = [
        rendered.selected(b["spec"]["selector"]["matchLabels"])
        for b in rendered.of_kind("PodDisruptionBudget").values()
    ]
    serving = {name for name, _ in rendered.services()} - {"kv-agent"}  # a DaemonSet is not evicted
    assert sorted(name for names in budgets for name in names) == sorted(serving)


def test_the_router_reaches_its_workers_through_headless_services(rendered):
    ((_, container),) = [found for found in rendered.services() if found[0] == "router"]
    settings = parse(rendered.arguments(container), rendered.environment(container))
    for role in ("prefill", "decode"):
        host, _, number = settings[role].partition(":")
        service = rendered.of_kind("Service")[host]["spec"]
        assert service["clusterIP"] == "None"
        (port,) = service["ports"]
        (workload,) = rendered.selected(service["selector"])
        (worker,) = [c for c in rendered.pod(workload)["containers"] if c["args"][0] == f"{role}_service"]
        # A headless Service hands out addresses alone: the pod must listen on the port that the router asks for.
        found = {p["containerPort"] for p in worker["ports"] if p["name"] == port["targetPort"]}
        assert found == {port["port"]} == {int(number)}


def test_probes_name_ports_that_exist(rendered):
    for name, container in rendered.services():
        ports = [p["name"] for p in container["ports"]] + [p["containerPort"] for p in container["ports"]]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            definition = container[probe]
            assert (definition["httpGet"] if name == "router" else definition["grpc"])["port"] in ports
            if name == "router":  # what answers without the API key
                assert definition["httpGet"]["path"].encode() in OPEN_PATHS


def test_volumes_are_mounted_and_mounts_have_volumes(rendered):
    for name in rendered.workloads:
        pod = rendered.pod(name)
        everyone = [*pod["containers"], *pod.get("initContainers", [])]
        mounted = {mount["name"] for c in everyone for mount in c.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}


def test_metrics_are_scraped_by_both_ways(rendered):
    for name in {name for name, _ in rendered.services()}:
        annotations = rendered.template(name)["metadata"]["annotations"]
        (first, *_) = rendered.pod(name)["containers"]
        assert annotations["prometheus.io/scrape"] == "true"
        assert int(annotations["prometheus.io/port"]) in [port["containerPort"] for port in first["ports"]]
    for monitor in rendered.of_kind("PodMonitor").values():
        scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        names = rendered.selected(monitor["spec"]["selector"]["matchLabels"])
        for name, container in rendered.services():
            assert name in names
            assert len(scraped & {port["name"] for port in container["ports"]}) == 1
            assert monitor["spec"]["jobLabel"] in rendered.labels(name)


def test_readme_lists_every_component():
    text = (ROOT / "docs" / "operating.md").read_text()
    for name in (*COMPONENTS, "small", "gpu", "gpu-multinode"):
        assert f"`{name}`" in text or f"k8s/{name}" in text, name


def test_the_overlay_in_the_documentation_does_what_it_says(tmp_path):
    text = (ROOT / "docs" / "operating.md").read_text()
    (example,) = re.findall(r"```yaml\n(# production/kustomization.yaml.*?)```", text, re.S)
    copy_with_secret(tmp_path)
    documents = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(build_own(tmp_path, example))}
    for role, count in (("prefill", 4), ("decode", 8)):
        found = documents["StatefulSet", role]
        assert found["metadata"]["namespace"] == "chat"
        assert found["spec"]["replicas"] == count
        pod = found["spec"]["template"]["spec"]
        images = {container["image"] for container in (*pod["containers"], *pod["initContainers"])}
        assert images == {"registry.example.org/mini-infer:1.2.3-cuda"}
    (config,) = [document for (kind, _), document in documents.items() if kind == "ConfigMap"]
    assert config["data"]["MINI_INFER_MAX_NUM_SEQS"] == "128"


def test_the_patches_in_the_documentation_name_another_model(tmp_path):
    text = (ROOT / "docs" / "operating.md").read_text()
    (patches,) = re.findall(r"```yaml\n(patches:.*?MINI_INFER_MODEL.*?)```", text, re.S)
    own = {"resources": ["../k8s/small"], "components": ["../k8s/components/model-cache"]} | yaml.safe_load(patches)
    copy_with_secret(tmp_path)
    documents = {d["kind"]: d for d in yaml.safe_load_all(build_own(tmp_path, yaml.safe_dump(own)))}
    assert documents["ConfigMap"]["data"]["MINI_INFER_MODEL"] == "/models/NAME"
    (download,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    assert download["args"] == ["common.download", "ORGANIZATION/NAME", "/models/NAME"]


def test_without_a_secret_of_ones_own_kubectl_says_which_file_is_missing(tmp_path):
    copy_with_secret(tmp_path)
    (tmp_path / "k8s" / "components" / "secret" / "secret.env").unlink()
    for overlay in ("small", "gpu", "gpu-multinode"):
        folder = tmp_path / overlay
        folder.mkdir()
        (tmp_path / "k8s").rename(folder / "k8s")
        with pytest.raises(RuntimeError, match=r"secret\.env: no such file"):
            build_own(folder, yaml.safe_dump({"resources": [f"../k8s/{overlay}"]}))
        (folder / "k8s").rename(tmp_path / "k8s")


def test_only_documents_lie_in_the_folders():
    for path in (ROOT / "k8s").rglob("kustomization.yaml"):
        listed = yaml.safe_load(path.read_text())
        named = str(listed)
        for other in path.parent.glob("*.yaml"):
            assert other == path or other.name in named or other.name == "adapter-values.yaml", other
