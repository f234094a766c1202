"""mini-infer on a node of a test: a variant of k8s/ in a namespace, and requests to it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import httpx
import openai

from cli.cluster.ports import free_ports
from tests.deploy.kubernetes.kubelet_node import Node
from tests.deploy.kubernetes.kustomize import Document, build

APPLY = ["apply", "--server-side", "--validate=strict", "--filename=-"]
READY_SECONDS = 180.0
# Two cores are shared by all pods: a thread a worker, and requests that let everything be placed at once.
SETTINGS = {"MINI_INFER_NUM_THREADS": "1"}
_SMALL = '[{"op": "replace", "path": "/spec/template/spec/containers/%d/resources/requests/cpu", "value": "50m"}]'
PATCHES = [{"target": {"kind": "StatefulSet|Deployment|DaemonSet"}, "patch": _SMALL % 0}]
PATCHES_OF_SHARED_POD = [*PATCHES, {"target": {"kind": "StatefulSet"}, "patch": _SMALL % 1}]


class Installation:
    def __init__(self, node: Node, namespace: str) -> None:
        self.node, self.plane, self.namespace = node, node.plane, namespace

    def apply(self, variant: str, settings: dict[str, str] | None = None, patches: Sequence[Document] = ()) -> None:
        patches = [*(PATCHES_OF_SHARED_POD if variant == "shared-pod" else PATCHES), *patches]
        text = build(variant, self.namespace, SETTINGS | (settings or {}), patches)
        self.plane.kubectl(*APPLY, stdin=text)

    def remove(self) -> None:
        """Wait for the pods to end, too."""
        at = f"--namespace={self.namespace}"
        self.plane.kubectl("delete", "namespace", self.namespace, "--wait=false", "--ignore-not-found")
        self.plane.wait_until("the pods have ended", lambda: not self.plane.get("pods", at)["items"])

    def kubectl(self, *arguments: str, fails: bool = False) -> str:
        return self.plane.kubectl(f"--namespace={self.namespace}", *arguments, fails=fails)

    def pods(self, *names: str) -> list[Document]:
        """Return the pods of workloads, all without names; pods that are ending are left out."""
        found = self.plane.get("pods", f"--namespace={self.namespace}")["items"]
        return [
            pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"]
            and (not names or pod["metadata"]["labels"]["app.kubernetes.io/name"] in names)
        ]

    def pod(self, name: str) -> Document:
        """Return the only pod of a workload."""
        (found,) = self.pods(name)
        return found

    def python(self, workload: str, code: str) -> str:
        """Run Python in the first container of a workload's one pod."""
        return self.kubectl("exec", self.pod(workload)["metadata"]["name"], "--", "python", "-c", code).strip()

    def wait_until(self, what: str, is_so: Callable[[], bool], seconds: float = READY_SECONDS) -> float:
        """Wait until the condition holds; return the seconds. On timeout, the error has the state of the cluster."""
        start = time.monotonic()
        try:
            self.plane.wait_until(what, is_so, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from error
        return time.monotonic() - start

    def wait_ready(self, num_pods: int, seconds: float = READY_SECONDS) -> float:
        """Wait for pods, and for every router's connection to every worker; return the seconds."""
        waited = self.wait_until(f"{num_pods} pods are ready", lambda: self._are_ready(num_pods), seconds)
        return waited + self.wait_until("routers know all workers", self._are_connected)

    def _are_ready(self, num_pods: int) -> bool:
        found = [pod for pod in self.pods() if pod["status"]["phase"] != "Succeeded"]
        return len(found) == num_pods and all(is_ready(pod) for pod in found)

    def _are_connected(self) -> bool:
        workers = [pod for pod in self.pods() if _component(pod) == "worker"]
        expected = sum(len(pod["spec"]["containers"]) for pod in workers)
        connected = [
            sum(worker["state"] == "ready" for worker in self._workers(router)) for router in self.pods("router")
        ]
        return connected == [expected] * len(connected)

    def _workers(self, router: Document) -> list[Document]:
        found = httpx.get(f"http://{router['status']['podIP']}:8000/v1/cluster", timeout=10).json()
        workers: list[Document] = found["workers"]
        return workers

    def describe(self) -> str:
        texts = [self.kubectl("get", "pods", "--output=wide"), self.kubectl("get", "events")[-4000:]]
        for pod in self.pods():
            name = pod["metadata"]["name"]
            with contextlib.suppress(AssertionError):  # it may not have started yet
                texts.append(f"--- {name}\n" + self.kubectl("logs", name, "--all-containers", "--tail=30"))
        return "\n".join(texts)

    def events(self, reason: str) -> list[str]:
        found = self.plane.get("events", f"--namespace={self.namespace}", f"--field-selector=reason={reason}")
        return [f"{e['involvedObject']['name']}: {e['message']}" for e in found["items"]]

    # -- requests ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forwarded(self) -> Iterator[str]:
        """Address of the Service `router` as docs/operating.md has it."""
        (port,) = free_ports(1)
        command = ["kubectl", f"--kubeconfig={self.plane.kubeconfig}", f"--namespace={self.namespace}"]
        command += ["port-forward", "service/router", f"{port}:80"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            self.wait_until("the port is forwarded", lambda: _answers(f"{url}/livez"))
            yield url
        finally:
            process.terminate()
            process.wait()

    def url(self) -> str:
        """Address of the router's pod; the bridge can be reached from here."""
        return f"http://{self.pod('router')['status']['podIP']}:8000"

    def stream(self, prompt: str, max_tokens: int, url: str = "", begun: threading.Event | None = None) -> str:
        """Return the greedy completion of `prompt`. Raises an error of openai or AssertionError when it is cut.

        begun: set at the first token.
        """
        with openai.OpenAI(base_url=f"{url or self.url()}/v1", api_key="none", max_retries=0, timeout=120) as client:
            (model,) = client.models.list().data
            chunks = client.completions.create(
                model=model.id, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            choices = []
            for chunk in chunks:
                choices += chunk.choices
                if begun is not None:
                    begun.set()
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
        return "".join(choice.text for choice in choices)

    def metric(self, workload: str, pattern: str, port: int = 9100) -> dict[str, float]:
        """Return values of the series that match, by the pattern's first group, summed over the workload's pods."""
        values: dict[str, float] = {}
        for pod in self.pods(workload):
            text = httpx.get(f"http://{pod['status']['podIP']}:{port}/metrics", timeout=10).text
            for key, value in re.findall(rf"^{pattern} (\S+)$", text, re.M):
                values[key] = values.get(key, 0.0) + float(value)
        return values

    def transports(self, workload: str = "decode", port: int = 9100) -> set[str]:
        """Return the transports by which its decode workers have pulled KV."""
        pattern = r'mini_infer_kv_transfers_total\{.*?transport="(\w+)".*?\}'
        return {name for name, count in self.metric(workload, pattern, port).items() if count}


@contextlib.contextmanager
def installed(
    node: Node, variant: str, namespace: str, settings: dict[str, str] | None = None, patches: Sequence[Document] = ()
) -> Iterator[Installation]:
    """Apply a variant; remove it afterwards with everything that it started."""
    made = Installation(node, namespace)
    try:
        made.apply(variant, settings, patches)
        yield made
    finally:
        made.remove()


def is_ready(pod: Document) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def _component(pod: Document) -> str:
    return str(pod["metadata"]["labels"].get("app.kubernetes.io/component", ""))


def names(pods: list[Document]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def restarts(pod: Document) -> int:
    return sum(status["restartCount"] for status in pod["status"]["containerStatuses"])


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=2).status_code == 200
    return False
