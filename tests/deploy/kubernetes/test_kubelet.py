"""k8s/ on a real kubelet: `make test-kubelet`; needs root and takes some minutes.

Figures are printed: ARGS=-s shows them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.deploy.installation import Installation, installed, is_ready, names, restarts
from tests.deploy.kubernetes.kubelet_node import why_not

pytestmark = [pytest.mark.kubelet, pytest.mark.timeout(900), pytest.mark.skipif(bool(why_not()), reason=why_not())]
SYSTEM = "You answer questions about countries, rivers, mountains and cities. " * 12
STORY = "Once upon a time, in a village by the sea, there lived "
KILL_ENGINE = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"\\0worker.engine_main\\0" in path.read_bytes():
        os.kill(int(path.parent.name), signal.%s)
"""


@pytest.fixture(scope="module")
def small(node):
    """Install one pod of each service; wait until all are ready."""
    start = time.monotonic()
    with installed(node, "small", "small") as found:
        found.wait_ready(3)
        print(f"from apply to ready: {time.monotonic() - start:.1f} s")
        assert not any(restarts(pod) for pod in found.pods())
        yield found


@pytest.fixture(scope="module")
def exact(small):
    """Install it with other settings: streams that move keep their tokens, and move soon when a worker drains."""
    before = {pod["metadata"]["uid"] for pod in small.pods()}
    small.apply("small", {"MINI_INFER_DTYPE": "float32", "MINI_INFER_DRAIN_GRACE_SECONDS": "3"})
    small.wait_until("all pods are new", lambda: not before & {pod["metadata"]["uid"] for pod in small.pods()})
    small.wait_ready(3)
    return small


def test_a_chat_request_through_the_service_is_answered(small):
    with small.forwarded() as url:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is Paris?"}]
        body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] > 1
    assert small.transports() == {"tcp"}


def test_pods_have_the_rights_that_they_need_and_no_more(small):
    look = """
import json, os, pathlib, stat
status = dict(line.split(":\t", 1) for line in open("/proc/1/status"))
found = {name: status[name].strip() for name in ("Uid", "Gid", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")}
for name in ("/app", "/venv", "/etc"):
    found[name] = os.access(name, os.W_OK)
tmp = os.stat("/tmp")
found["tmp"] = [tmp.st_uid, tmp.st_gid, oct(stat.S_IMODE(tmp.st_mode))]
found["sockets"] = [oct(stat.S_IMODE(p.stat().st_mode)) for p in pathlib.Path("/tmp").glob("mini-infer-*")]
try:
    open("/app/x", "w")
except OSError as error:
    found["write"] = error.strerror
print(json.dumps(found))
"""
    for name in ("router", "prefill", "decode"):
        found = json.loads(small.python(name, look))
        assert found.pop("sockets") == ([] if name == "router" else ["0o2700"])
        assert found == {
            "Uid": "\t".join(["10001"] * 4), "Gid": "\t".join(["10001"] * 4),
            "CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2",
            "/app": False, "/venv": False, "/etc": False, "write": "Read-only file system",
            "tmp": [0, 10001, "0o2777"],
        }  # fmt: skip


def test_a_pod_whose_engine_is_killed_starts_again_and_its_streams_go_on(exact):
    expected = exact.stream(STORY, 300)
    before = exact.pod("decode")
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(exact.stream, STORY, 300, begun=begun)
        assert begun.wait(120)
        killed = time.monotonic()
        with contextlib.suppress(AssertionError):  # the container may end before this command
            exact.python("decode", KILL_ENGINE % "SIGKILL")
        assert not stream.done()
        exact.wait_until("the container starts again", lambda: restarts(exact.pod("decode")) > restarts(before))
        exact.wait_ready(3)
        seconds = time.monotonic() - killed
        assert stream.result() == expected
    after = exact.pod("decode")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert restarts(after) == restarts(before) + 1
    print(f"from the engine's end to ready: {seconds:.1f} s")


def test_a_stopped_engine_is_taken_out_of_service_and_then_replaced(exact):
    expected = exact.stream(STORY, 20)
    before = restarts(exact.pod("prefill"))
    exact.python("prefill", KILL_ENGINE % "SIGSTOP")
    stopped = time.monotonic()
    seen = []

    def is_out():
        seen.append(exact.pod("prefill"))
        return not is_ready(seen[-1])

    exact.wait_until("the pod is not ready", is_out)
    out = time.monotonic() - stopped
    assert restarts(seen[-1]) == before  # readiness goes first
    assert exact.stream(STORY + SYSTEM, 5)  # without a prefill worker
    assert exact.stream(STORY, 20) == expected
    exact.wait_until("the container is replaced", lambda: restarts(exact.pod("prefill")) > before)
    replaced = time.monotonic() - stopped
    exact.wait_ready(3)
    assert any("Liveness probe" in e or "liveness probe" in e for e in exact.events("Killing"))
    print(f"stopped engine: out after {out:.1f} s, replaced after {replaced:.1f} s")


class Load:
    """Runs streams one after the other in three threads, for the time of a `with`."""

    def __init__(self, installation: Installation, max_tokens: int) -> None:
        self._installation, self._max_tokens = installation, max_tokens
        self._prompts = [f"{STORY}{animal}" for animal in ("a cat", "a dog", "a seal")]
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(len(self._prompts))
        self._expected = list(self._pool.map(lambda prompt: installation.stream(prompt, max_tokens), self._prompts))

    def _run(self, index: int) -> int:
        url, count = self._installation.url(), 0
        while not self._stop.is_set():
            assert self._installation.stream(self._prompts[index], self._max_tokens, url) == self._expected[index]
            count += 1
        return count

    def __enter__(self) -> Load:
        self._runs = [self._pool.submit(self._run, index) for index in range(len(self._prompts))]
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def count(self) -> int:
        """Return the number of complete and right streams. Raises the error of a stream."""
        return sum(run.result() for run in self._runs)


def migrations(installation: Installation) -> float:
    return sum(installation.metric("router", r"(mini_infer_migrations)_total(?:\{.*\})?").values())


def test_a_rollout_of_decode_workers_loses_no_stream(exact):
    exact.kubectl("scale", "statefulset/decode", "--replicas=2")
    exact.wait_ready(4)
    before = {pod["metadata"]["uid"] for pod in exact.pods("decode")}
    moved = migrations(exact)
    with Load(exact, 120) as load:
        time.sleep(2)
        exact.kubectl("rollout", "restart", "statefulset/decode")

        def is_done():
            pods = exact.pods("decode")
            return len(pods) == 2 and all(is_ready(p) and p["metadata"]["uid"] not in before for p in pods)

        seconds = exact.wait_until("both pods are new and ready", is_done, 240)
    assert load.count() >= 3
    moves = migrations(exact) - moved  # none where all streams end within the time that a drained worker gives them
    print(f"rollout of two decode workers: {seconds:.1f} s, {load.count()} streams, {moves:.0f} moves, none lost")


def test_a_rollout_of_the_router_finishes_its_streams(exact):
    expected = exact.stream(STORY, 400)
    old = exact.pod("router")["metadata"]["name"]
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(exact.stream, STORY, 400, begun=begun)
        assert begun.wait(120)
        exact.kubectl("rollout", "restart", "deployment/router")
        exact.wait_until("the old router is asked to end", lambda: old not in names(exact.pods("router")))
        assert stream.result() == expected
    exact.wait_until("the old router is gone", lambda: old not in exact.kubectl("get", "pods"))


def test_both_routers_of_the_base_reach_all_four_workers(node):
    with installed(node, "base", "base") as base:
        base.wait_ready(6)
        for pod in base.pods("router"):
            assert base.stream(STORY + SYSTEM, 8, f"http://{pod['status']['podIP']}:8000")
        assert not any(restarts(pod) for pod in base.pods())
