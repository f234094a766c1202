"""A node of Kubernetes for a test: containerd and a kubelet in mount and PID namespaces of their own.

What they mount, start or write below /run is theirs alone and ends with them. On the host there are, for the time of
the test, a network bridge for the pods, a control group in each hierarchy, and a folder with images and volumes.
There is no kube-proxy: Services with an address of their own are reached by port-forward.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tests.deploy.kubernetes.control_plane import ControlPlane, has_kubelet
from tests.deploy.kubernetes.service_names import service_names

CNI_PLUGINS = Path("/usr/lib/cni")  # Debian's containernetworking-plugins
CGROUPS = Path("/sys/fs/cgroup")
PROGRAMS = ("containerd", "ctr", "runc", "dnsmasq", "ip", "iptables-save", "unshare", "nsenter")
NAME = "node-of-a-test"
PAUSE_IMAGE = "mini-infer-pause:kubelet-test"
START_SECONDS = 120.0


def why_not() -> str:
    """Return the reason why no node can be started here; empty when one can."""
    if os.geteuid() != 0:
        return "needs root"
    if not has_kubelet():
        return "needs a kubelet: KUBEBUILDER_ASSETS, or shared/kubernetes/kube.xz and etcd"
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if not (CNI_PLUGINS / "bridge").exists():
        absent.append("containernetworking-plugins")
    return f"needs {', '.join(absent)}" if absent else ""


class Node:
    """Joins `plane` by `with`. Raises RuntimeError with the end of a log when one of its programs ends early."""

    def __init__(self, plane: ControlPlane, images: Path, folder: Path) -> None:
        self.plane, self._images, self.folder = plane, images, folder
        self._stack = ExitStack()
        unique = secrets.token_hex(3)
        self._bridge, self._cgroup = f"mi-{unique}", f"mini-infer-{unique}"
        self._subnet = f"10.{100 + secrets.randbelow(100)}.{secrets.randbelow(256)}"
        self.address = f"{self._subnet}.1"
        self._rules_before = _rules()

    def __enter__(self) -> Node:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stack.close()

    def host(self, *command: str) -> str:
        """Run a command as the node sees its files and processes."""
        inside = ["nsenter", f"--target={self._init}", "--mount", "--pid", "--", *command]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stdout[-1000:]} {done.stderr[-2000:]}")
        return done.stdout

    def log(self, name: str, size: int = 3000) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-size:]

    def _start(self, stack: ExitStack) -> None:
        stack.callback(self._remove_cgroups)
        for hierarchy in _hierarchies():
            (hierarchy / self._cgroup).mkdir()
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "delete", self._bridge)
        _run("ip", "address", "add", f"{self.address}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        stack.enter_context(service_names(self.plane, self.address, self.folder))
        stack.enter_context(self._containerd())
        _run("ctr", f"--address={self._socket}", "--namespace=k8s.io", "images", "import", str(self._images))
        self._start_kubelet(stack)
        self.plane.wait_until("the node is ready", self._is_ready, START_SECONDS)

    @contextlib.contextmanager
    def _containerd(self) -> Iterator[None]:
        self._socket = self.folder / "containerd.sock"
        for name in ("kubelet", "pods", "cni", "net.d", "containerd"):
            (self.folder / name).mkdir()
        (self.folder / "net.d" / "10-bridge.conflist").write_text(json.dumps(self._network()))
        (self.folder / "containerd.toml").write_text(self._containerd_settings())
        (self.folder / "node.sh").write_text(_NODE)
        command = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["sh", str(self.folder / "node.sh"), str(self.folder)]
        with (self.folder / "containerd.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._init = process.pid
        try:
            self._init = _child_of(process)
            deadline = time.monotonic() + START_SECONDS
            while subprocess.run(["ctr", f"--address={self._socket}", "version"], capture_output=True).returncode:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"containerd did not start: {self.log('containerd')}")
                time.sleep(0.2)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)  # and with it all that runs in its PID namespace
            process.wait()

    def _start_kubelet(self, stack: ExitStack) -> None:
        (self.folder / "kubelet.json").write_text(json.dumps(self._kubelet_settings()))
        command = ["nsenter", f"--target={self._init}", "--mount", "--pid", "--", self.plane.programs["kubelet"]]
        command += [f"--config={self.folder / 'kubelet.json'}", f"--kubeconfig={self.plane.kubeconfig}"]
        command += [f"--root-dir={self.folder / 'kubelet'}", f"--cert-dir={self.folder / 'kubelet' / 'pki'}"]
        command += [f"--node-ip={self.address}", f"--hostname-override={NAME}"]
        with (self.folder / "kubelet.log").open("wb") as log:
            self._kubelet = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(self._kubelet.wait)
        stack.callback(self._kubelet.kill)

    def _is_ready(self) -> bool:
        if self._kubelet.poll() is not None:
            raise RuntimeError(f"the kubelet has ended: {self.log('kubelet')}")
        for node in self.plane.get("nodes")["items"]:
            conditions = {c["type"]: c["status"] for c in node["status"].get("conditions", [])}
            return conditions.get("Ready") == "True" and not node["spec"].get("taints")
        return False

    def _network(self) -> dict:
        bridge = {
            "type": "bridge",
            "bridge": self._bridge,
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.folder / "cni"),
                "ranges": [[{"subnet": f"{self._subnet}.0/24", "gateway": self.address}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}

    def _containerd_settings(self) -> str:
        return f"""
version = 2
root = "{self.folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "{self._socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/library/{PAUSE_IMAGE}"
  restrict_oom_score_adj = true  # where the right to lower it is missing
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{self.folder}/net.d"
"""

    def _kubelet_settings(self) -> dict:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "healthzBindAddress": self.address,
            # Only this machine reaches the bridge.
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._cgroup}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "clusterDNS": [self.address],
            "clusterDomain": "cluster.local",
            "resolvConf": "/dev/null",
            "makeIPTablesUtilChains": False,  # of the host
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "podLogsDir": str(self.folder / "pods"),
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        }

    def _remove_cgroups(self) -> None:
        deadline = time.monotonic() + 60.0
        while found := self._cgroups():  # a process that just ended may still be counted
            for own in found:
                for path in [*sorted((p for p in own.rglob("*") if p.is_dir()), reverse=True), own]:
                    with contextlib.suppress(OSError):
                        path.rmdir()
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def _cgroups(self) -> list[Path]:
        return [path for path in (hierarchy / self._cgroup for hierarchy in _hierarchies()) if path.exists()]

    def left_behind(self) -> list[str]:
        """Return what it has left on the host, which should be nothing: mounts, link, control groups, rules."""
        mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(self.folder) in line]
        links = [path.name for path in Path("/sys/class/net").glob(self._bridge)]
        return mounts + links + [str(path) for path in self._cgroups()] + sorted(_rules() - self._rules_before)


# The kubelet and containerd see a /run of their own, and so sockets, network namespaces and hostPath volumes.
_NODE = """
set -e
mount -t tmpfs -o mode=0755 tmpfs /run
containerd --config="$1/containerd.toml" &
wait $!
"""


def _rules() -> set[str]:
    """Return Kubernetes' packet filter rules on the host, those of a cluster that it may be part of included."""
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True).stdout.splitlines()
    return {rule for rule in rules if "KUBE-" in rule}


def _hierarchies() -> list[Path]:
    """Return the roots of the host's control groups: one with version 2, one a controller with version 1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]


def _child_of(process: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        if text := children.read_text().split():
            return int(text[0])
        time.sleep(0.02)
    raise RuntimeError(f"unshare has ended with {process.returncode}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]} {done.stderr[-2000:]}")
