"""A Kubernetes control plane on loopback: etcd, API server, controller manager and scheduler. It has no kubelet.

The programs come from KUBEBUILDER_ASSETS, as controller projects have them, or from one static binary that is each of
them by its name (KUBE_ARCHIVE, by default shared/kubernetes/kube.xz beside the repository). Where only etcd and
kube-apiserver are there, nothing acts on the objects.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from cli.cluster.ports import free_ports
from tests.deploy.kubernetes.kustomize import ROOT

START_SECONDS = 200.0
WAIT_SECONDS = 120.0  # only ends what hangs
TOKEN = "token-of-a-test"


def find_programs(folder: Path) -> dict[str, str]:
    """Return paths by name; those of an archive are unpacked into `folder`."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    found = {path.name: str(path) for path in Path(assets).iterdir()} if assets else {}
    archive = _archive()
    if "kube-apiserver" not in found and archive:
        with lzma.open(archive) as packed, (folder / "kube").open("wb") as binary:
            shutil.copyfileobj(packed, binary, 1 << 20)
        (folder / "kube").chmod(0o755)
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"):
            (folder / name).symlink_to("kube")
            found[name] = str(folder / name)
    for name in ("etcd", "openssl"):
        if name not in found and (path := shutil.which(name)):
            found[name] = path
    return found


def is_available() -> bool:
    has_server = bool(os.environ.get("KUBEBUILDER_ASSETS") or (_archive() and shutil.which("etcd")))
    return has_server and all(shutil.which(name) for name in ("kubectl", "openssl"))


def has_kubelet() -> bool:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    return is_available() and bool(Path(assets, "kubelet").exists() if assets else _archive())


def _archive() -> Path | None:
    named = os.environ.get("KUBE_ARCHIVE")
    candidates = [Path(named)] if named else [p / "shared" / "kubernetes" / "kube.xz" for p in ROOT.parents]
    return next((path for path in candidates if path.is_file()), None)


class ControlPlane:
    """Started by `with`, gone after it. Raises RuntimeError with the end of its log when a program ends early.

    nodes_live: nodes have kubelets, and are marked when they no longer report.
    """

    def __init__(self, *, nodes_live: bool = False) -> None:
        self._nodes_live = nodes_live
        self._stack = ExitStack()
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> ControlPlane:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="control-plane-")))
            stack.callback(self._end)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def has_controllers(self) -> bool:
        return {"kube-controller-manager", "kube-scheduler"} <= {name for name, _ in self._processes}

    def kubectl(self, *arguments: str, stdin: str | None = None, fails: bool = False) -> str:
        """Return the output of a command; with `fails` its error message."""
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        env = dict(os.environ, HOME=str(self._folder))  # its cache of what the server has
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=WAIT_SECONDS, env=env)
        if (done.returncode != 0) != fails:
            raise AssertionError(f"{' '.join(arguments)}: {done.stdout[-1000:]} {done.stderr[-3000:]}")
        return done.stderr if fails else done.stdout

    def get(self, *arguments: str, stdin: str | None = None) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", "-o=json", *arguments, stdin=stdin))
        return found

    def offer_volume(self, name: str, **source: dict[str, str]) -> None:
        """Which one claim may have, with as many pods as it has. source: a field of a PersistentVolume."""
        spec = {"accessModes": ["ReadWriteMany"], "capacity": {"storage": "10Gi"}, **source}
        volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
        self.kubectl("create", "--filename=-", stdin=json.dumps(volume))

    def evict(self, namespace: str, pod: str, fails: bool = False) -> str:
        """Evict a pod, as a drain of its node does; with `fails` return the refusal."""
        metadata = {"name": pod, "namespace": namespace}
        eviction = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        return self.kubectl("create", f"--raw={path}", "--filename=-", stdin=eviction, fails=fails)

    def may_be_evicted(self, namespace: str, budget: str) -> bool:
        """True when a disruption budget lets one pod go."""
        found = self.get("poddisruptionbudget", budget, f"--namespace={namespace}")
        return found.get("status", {}).get("disruptionsAllowed") == 1

    def wait_until(self, what: str, is_so: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds:.0f} s: {what}")
            self._check_processes()
            time.sleep(0.3)

    def _start(self) -> None:
        folder, programs = self._folder, find_programs(self._folder)
        self.programs = programs
        etcd, peer, port = free_ports(3)
        url, peers = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        self._run(
            programs["etcd"], f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}", f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )  # fmt: skip
        key, public = folder / "sa.key", folder / "sa.pub"
        for command in (
            ["genrsa", "-out", str(key), "2048"],
            ["rsa", "-in", str(key), "-pubout", "-out", str(public)],
        ):
            subprocess.run([programs["openssl"], *command], check=True, capture_output=True)
        (folder / "tokens.csv").write_text(f"{TOKEN},admin,1\n")
        self._run(
            programs["kube-apiserver"], f"--etcd-servers={url}", "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-key-file={public}", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc", f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=AlwaysAllow", f"--cert-dir={folder / 'certs'}", "--bind-address=127.0.0.1",
            f"--secure-port={port}", "--advertise-address=192.0.2.2", "--endpoint-reconciler-type=none",
            "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP",
        )  # fmt: skip
        self._write_kubeconfig(f"https://127.0.0.1:{port}")
        self.wait_until("the API server is ready", self._is_ready, START_SECONDS)
        common = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--secure-port=0"]
        if "kube-controller-manager" in programs:
            self._run(
                programs["kube-controller-manager"], *common, f"--service-account-private-key-file={key}",
                f"--controllers=*{'' if self._nodes_live else ',-node-lifecycle-controller'}",
                "--horizontal-pod-autoscaler-sync-period=1s", "--pvclaimbinder-sync-period=1s",
            )  # fmt: skip
        if "kube-scheduler" in programs:
            self._run(programs["kube-scheduler"], *common)

    def _write_kubeconfig(self, server: str) -> None:
        self.kubeconfig = self._folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "test", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def _is_ready(self) -> bool:
        with suppress(AssertionError):
            return self.kubectl("get", "--raw=/readyz") == "ok"
        return False

    def _run(self, program: str, *arguments: str) -> None:
        name = Path(program).name
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([program, *arguments], stdout=log, stderr=log, cwd=self._folder)
        self._processes.append((name, process))

    def _check_processes(self) -> None:
        for name, process in self._processes:
            if process.poll() is not None:
                log = (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} has ended with {process.returncode}: {log}")

    def _end(self) -> None:
        for _, process in reversed(self._processes):  # nothing of theirs is kept
            process.kill()
            process.wait()
