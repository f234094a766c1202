"""kubectl's output for k8s/: the overlays, and each component on top of the smallest one."""

from __future__ import annotations

import base64
import copy
import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.settings import VARIABLES

ROOT = Path(__file__).parents[3]
COMPONENTS = tuple(sorted(path.parent.name for path in (ROOT / "k8s" / "components").glob("*/kustomization.yaml")))
NOT_ON_SMALL = ("secret", "tensor-parallel", "leader-worker-set")  # parts of overlays
COMBINED = {
    "everything": (
        "small", "node-agent", "model-cache", "monitoring", "autoscaling", "network-policy", "priority", "ingress",
    ),
    "one-pod": ("small", "shared-pod", "model-cache", "monitoring", "network-policy", "priority", "gateway"),
    "gpu-node": ("gpu", "node-agent", "model-cache", "monitoring", "autoscaling-keda", "priority"),
    "gpu-groups": ("gpu-multinode", "monitoring", "network-policy"),
    "gpu-groups-cached": ("gpu", "node-agent", "model-cache", "priority", "tensor-parallel", "leader-worker-set"),
}  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = (
    {"base": ("base", "secret"), "small": ("small",), "gpu": ("gpu",), "gpu-multinode": ("gpu-multinode",)}
    | {name: ("small", name) for name in COMPONENTS if name not in NOT_ON_SMALL}
    | COMBINED
)
EXAMPLE = "example"  # the base alone: no service starts with its token
SECRET = "cluster-token=0123456789abcdef0123456789abcdef\n"
Document = dict[str, Any]


def build(
    variant: str,
    namespace: str = "mini-infer",
    settings: dict[str, str] | None = None,
    patches: list[Document] | None = None,
) -> str:
    """Build a variant's documents in a namespace, as kubectl prints them; with a secret, as a user would write it.

    settings: what the user's overlay sets in the ConfigMap. patches: further entries of its kustomization.
    """
    overlay, *components = ("base",) if variant == EXAMPLE else VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        copy_with_secret(Path(folder))
        kustomization: Document = {
            "namespace": namespace,
            "resources": [f"../k8s/{overlay}"],
            "components": [f"../k8s/components/{name}" for name in components],
        }
        if overlay.startswith("gpu"):  # for the pods that components bring
            kustomization["images"] = [{"name": "mini-infer", "newTag": "cuda"}]
        if settings:
            literals = [f"{key}={value}" for key, value in settings.items()]
            kustomization["configMapGenerator"] = [{"name": "mini-infer", "behavior": "merge", "literals": literals}]
        if patches:
            kustomization["patches"] = patches
        return build_own(Path(folder), yaml.safe_dump(kustomization))


def copy_with_secret(folder: Path) -> None:
    """Copy k8s/ to `folder`, with the secret that a user makes."""
    k8s = folder / "k8s"
    shutil.copytree(ROOT / "k8s", k8s)
    (k8s / "components" / "secret" / "secret.env").write_text(SECRET)


def build_own(folder: Path, kustomization: str) -> str:
    """Build a user's overlay next to k8s/ in `folder`. Raises RuntimeError with kubectl's message."""
    own = folder / "own"
    own.mkdir()
    (own / "kustomization.yaml").write_text(kustomization)
    command = ["kubectl", "kustomize", str(own)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=dict(os.environ, LC_ALL="C"))
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


@functools.cache
def _documents(variant: str) -> list[Document]:
    return list(yaml.load_all(build(variant), yaml.CSafeLoader))


class Rendered:
    """The documents of one variant, with lookups."""

    def __init__(self, variant: str) -> None:
        self.documents: list[Document] = copy.deepcopy(_documents(variant))
        self.workloads = {d["metadata"]["name"]: d for d in self.documents if pod_template(d)}

    def of_kind(self, *kinds: str) -> dict[str, Document]:
        return {d["metadata"]["name"]: d for d in self.documents if d["kind"] in kinds}

    def template(self, name: str) -> Document:
        template = pod_template(self.workloads[name])
        assert template
        return template

    def pod(self, name: str) -> Document:
        return self.template(name)["spec"]

    def labels(self, name: str) -> dict[str, str]:
        return self.template(name)["metadata"]["labels"]

    def selected(self, labels: dict[str, str]) -> list[str]:
        """Return names of the workloads whose pods have these labels."""
        return [name for name in self.workloads if labels.items() <= self.labels(name).items()]

    def containers(self) -> list[tuple[str, Document]]:
        """Return (workload, container), including init containers."""
        return [
            (name, container)
            for name in self.workloads
            for container in [*self.pod(name)["containers"], *self.pod(name).get("initContainers", [])]
        ]

    def services(self) -> list[tuple[str, Document]]:
        """Return (workload, container) of services, which have settings."""
        return [
            (name, c)
            for name, c in self.containers()
            if not c.get("args", [""])[0].startswith("common.") and "args" in c
        ]

    def environment(self, container: Document) -> dict[str, str]:
        """Return the variables as the kubelet sets them, `from-the-pod` for what only a running pod knows."""
        env: dict[str, str] = {}
        for source in container.get("envFrom", []):
            env |= self.of_kind("ConfigMap")[source["configMapRef"]["name"]]["data"]
        for entry in container.get("env", []):
            env[entry["name"]] = self._value(entry, env)
        return env

    def arguments(self, container: Document) -> list[str]:
        env = self.environment(container)
        return [_expanded(text, env) for text in container["args"]]

    def _value(self, entry: Document, env: dict[str, str]) -> str:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            return "from-the-pod"
        if reference := source.get("secretKeyRef"):
            if reference.get("optional"):
                return "from-a-secret"
            secret = self.of_kind("Secret")[reference["name"]]
            return base64.b64decode(secret["data"][reference["key"]] or "").decode()
        return _expanded(entry["value"], env)


def _expanded(text: str, env: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], text)


def pod_template(document: Document) -> Document | None:
    """Return the pod template of a workload of any kind."""
    spec = document.get("spec", {})
    template: Document | None = spec.get("template") or spec.get("leaderWorkerTemplate", {}).get("workerTemplate")
    return template


def unknown_variables(env: dict[str, str]) -> set[str]:
    return {name for name in env if name.startswith("MINI_INFER_")} - VARIABLES
