"""The node agent: pins die with their connection, committed blocks do not; nonsense on its sockets does nothing."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from cli.cluster.ports import free_ports
from common.errors import ConfigError, OverloadedError, UnavailableError
from common.net.hosts import EXAMPLE_PREFIX
from common.token_ids import pack_ids
from kvstore.pool.block_hash import block_keys, group_key, root_key
from kvstore.tier import agent_client
from kvstore.tier.agent_client import AgentHostTier
from kvstore.tier.agent_server import serve
from kvstore.tier.host_tier import HostTier
from kvstore.tier.regions import Regions
from kvstore.tier.settings import AgentConfig
from kvstore.transports.sockets import connect_unix, recv_frame, send_frame
from kvstore.types import HostSlot
from tests.harness.processes import until_stopped
from tests.harness.waiting import wait_until
from tests.kvstore.helpers import shm_names

KEYS = block_keys(root_key("model"), pack_ids(range(8)), 1)
BLOCK_BYTES = 4096
NUM_SLOTS = 6


class Agent:
    """`python -m kvstore` in a process of its own."""

    def __init__(self, folder: Path, num_regions: int = 1, num_slots: int = NUM_SLOTS) -> None:
        self.socket = str(folder / "agent.sock")
        self.port, self.metrics_port = free_ports(2)
        gb = num_slots * BLOCK_BYTES / 2**30
        tier_gb = num_regions * gb
        command = [sys.executable, "-m", "kvstore", f"--port={self.port}", f"--socket={self.socket}"]
        command += [f"--host-tier-gb={tier_gb}", f"--region-gb={gb}", f"--metrics-port={self.metrics_port}"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.first_line = self.process.stderr.readline()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.stop(signal.SIGKILL)


def connect(agent: Agent) -> AgentHostTier:
    return AgentHostTier(agent.socket, "model", BLOCK_BYTES)


def test_two_workers_share_a_tier_that_outlives_them(agent: Agent) -> None:
    assert "ready" in agent.first_line
    first: HostTier = connect(agent)
    assert first.num_slots == NUM_SLOTS
    slots = first.reserve(KEYS[:3])
    assert slots is not None
    for i, slot in enumerate(slots):
        first.buffer[BLOCK_BYTES * slot : BLOCK_BYTES * slot + 3] = bytes([i, i, i])
    second = connect(agent)
    assert second.lookup(KEYS) == []
    first.commit(slots)
    assert second.missing(KEYS) == KEYS[3:]
    assert second.lookup(KEYS) == slots
    assert [second.buffer[BLOCK_BYTES * slot] for slot in slots] == [0, 1, 2]
    first.unpin(slots)
    assert first.reserve([KEYS[3], None]) is not None
    first.close()  # its connection ends, as when it is killed
    taken: list[HostSlot] = []

    def are_free_again() -> bool:
        taken[:] = second.reserve([None] * 3) or []
        return bool(taken)

    wait_until(are_free_again)
    second.unpin(taken)
    second.check_integrity()
    assert second.reserve([None] * 4) is None
    second.unpin(slots)
    second.close()
    third = connect(agent)
    assert third.lookup(KEYS) == slots
    third.close()


def test_keys_that_no_worker_has_stored_are_not_asked_for(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = connect(agent), connect(agent)
    asked: list[str] = []
    call = AgentHostTier._call

    def counted(tier: AgentHostTier, verb: str, items: Any) -> Any:
        asked.append(verb)
        return call(tier, verb, items)

    monkeypatch.setattr(AgentHostTier, "_call", counted)
    assert second.lookup(KEYS) == second.lookup([]) == []
    assert not asked
    slots = first.reserve(KEYS[:3])
    assert slots is not None
    assert second.lookup(KEYS) == []  # not before they are written
    first.commit(slots)
    assert second.lookup(KEYS) == slots
    first.unpin(slots)
    second.unpin(slots)
    taken = first.reserve([None] * NUM_SLOTS)  # evicts all three
    assert taken is not None
    asked.clear()
    assert second.lookup(KEYS) == []
    assert not asked
    first.close()
    second.close()


def test_keys_of_further_kv_groups_are_found(agent: Agent) -> None:
    tier = connect(agent)
    keys = [group_key(key, 1) for key in KEYS[:2]]
    slots = tier.reserve(keys)
    assert slots is not None
    tier.commit(slots)
    assert tier.lookup(keys) == slots
    tier.close()


def test_without_its_agent_a_worker_goes_on(agent: Agent) -> None:
    tier = connect(agent)
    slots = tier.reserve([None])
    assert slots is not None
    tier.buffer[0:4] = b"mine"
    assert agent.stop(signal.SIGKILL) == -signal.SIGKILL
    assert tier.reserve(KEYS) is None
    assert tier.lookup(KEYS) == []
    assert tier.missing(KEYS) == KEYS
    tier.unpin(slots)
    tier.commit(slots)
    tier.check_integrity()
    assert not tier.connected
    assert tier.buffer[0:4] == b"mine"
    tier.close()
    with pytest.raises(UnavailableError, match=f"does not answer on {agent.socket}"):
        AgentHostTier(agent.socket, "model", BLOCK_BYTES, start_seconds=0.0)


def test_a_worker_that_starts_waits_for_an_agent_that_does_not_answer_yet(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_client, "CALL_SECONDS", 0.1)
    agent.process.send_signal(signal.SIGSTOP)
    until_stopped(agent.process.pid)
    tiers: list[AgentHostTier] = []
    thread = threading.Thread(target=lambda: tiers.append(AgentHostTier(agent.socket, "model", BLOCK_BYTES)))
    thread.start()
    wait_until(lambda: "waiting for the node agent" in caplog.text or not thread.is_alive())
    monkeypatch.setattr(agent_client, "CALL_SECONDS", 60.0)
    agent.process.send_signal(signal.SIGCONT)
    thread.join(60.0)
    [tier] = tiers
    tier.close()


def test_a_new_agent_is_used_once_nothing_of_the_old_one_is_pinned(tmp_path: Path) -> None:
    now = 0.0
    agent = Agent(tmp_path)
    try:
        tier = AgentHostTier(agent.socket, "model", BLOCK_BYTES, clock=lambda: now)
        view = memoryview(tier.buffer)
        pinned = tier.reserve([None])
        assert pinned is not None
        view[:4] = b"mine"
        agent.stop(signal.SIGKILL)
        assert tier.missing(KEYS) == KEYS
        agent = Agent(tmp_path)
        now += 2.0
        assert tier.reserve(KEYS[:1]) is None  # a swapped sequence lies in the old memory
        assert bytes(view[:4]) == b"mine"
        tier.unpin(pinned)
        slots = tier.reserve(KEYS[:2])
        assert slots is not None
        assert tier.connected
        assert bytes(view[:4]) == bytes(4)
        for slot in slots:
            view[BLOCK_BYTES * slot] = slot + 7
        tier.commit(slots)
        tier.unpin(slots)
        other = connect(agent)
        assert other.lookup(KEYS) == slots
        assert [other.buffer[BLOCK_BYTES * slot] for slot in slots] == [slot + 7 for slot in slots]
        other.close()
        tier.check_integrity()

        agent.stop(signal.SIGKILL)
        assert tier.lookup(KEYS) == []
        agent = Agent(tmp_path)
        now += 0.5
        assert tier.lookup(KEYS) == []
        assert not tier.connected  # too early
        agent.stop(signal.SIGKILL)
        now += 1.0
        assert tier.lookup(KEYS) == []  # nobody there: twice as long until the next attempt
        agent = Agent(tmp_path, num_slots=NUM_SLOTS + 1)
        now += 1.0
        assert tier.lookup(KEYS) == []
        now += 1.5
        assert tier.lookup(KEYS) == []
        assert not tier.connected  # its memory has another size
        tier.close()
        now += 1000.0
        assert tier.lookup(KEYS) == []
        assert not tier.connected
    finally:
        agent.stop(signal.SIGKILL)


def test_memory_that_a_device_has_registered_stays_where_it_is(agent: Agent, tmp_path: Path) -> None:
    now = 0.0
    tier = AgentHostTier(agent.socket, "model", BLOCK_BYTES, reconnects=False, clock=lambda: now)
    agent.stop(signal.SIGKILL)
    assert tier.missing(KEYS) == KEYS
    again = Agent(tmp_path)
    try:
        now += 10_000.0
        assert tier.lookup(KEYS) == []
        assert not tier.connected
    finally:
        again.stop(signal.SIGKILL)
        tier.close()


def test_the_books_are_metrics(agent: Agent) -> None:
    tier = connect(agent)
    assert tier.reserve(KEYS[:3]) is not None
    with urlopen(f"http://127.0.0.1:{agent.metrics_port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'mini_infer_host_tier_slots{role="agent",state="pinned"} 3.0' in text
    assert 'mini_infer_host_tier_clients{role="agent"} 1.0' in text
    tier.close()


def test_sigterm_ends_it_cleanly(agent: Agent) -> None:
    shm = shm_names()
    tier = connect(agent)
    assert agent.stop() == 0
    assert not Path(agent.socket).exists()
    assert tier.lookup(KEYS) == []
    wait_until(lambda: shm_names() <= shm)
    tier.close()


@pytest.mark.parametrize(
    "requests",
    [
        [["lookup", []]],
        [["hello", "model", 0]],
        [["hello", "model", 2**63]],
        [["hello", "x" * 5000, 4096]],
        [["hello", "model", 4096], ["lookup", [b"short"]]],
        [["hello", "model", 4096], ["lookup", [None]]],
        [["hello", "model", 4096], ["unpin", [0]]],
        [["hello", "model", 4096], ["commit", [-1]]],
        [["hello", "model", 4096], ["commit", ["0"]]],
        [["hello", "model", 4096], ["reserve", 3]],
        [["hello", "model", 4096], ["dance"]],
        [["hello", "model", 4096], {"a": 1}],
        [["hello", "model", 4096], ["hello", "model", 4096]],
        [["hello", "model", 4096], ["lookup", [b"\0" * 32] * 70_000]],
    ],
)
def test_refused_requests_end_the_connection(shared_agent: Agent, requests: list[object]) -> None:
    with connect_unix(shared_agent.socket, 60.0) as sock:
        for request in requests:
            send_frame(sock, request)
        replies = []
        for _ in requests:
            reply, fds = recv_frame(sock, 1 << 20, max_fds=1)
            replies.append(reply[0])
            for fd in fds:
                os.close(fd)
        assert replies == ["ok"] * (len(requests) - 1) + ["error"]
        assert sock.recv(1) == b""
    tier = connect(shared_agent)
    tier.check_integrity()
    tier.close()


@pytest.fixture(scope="module")
def shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = Agent(tmp_path_factory.mktemp("agent"))
    yield agent
    assert agent.stop() == 0  # it survived everything


def test_a_second_agent_on_the_same_socket_says_so(shared_agent: Agent) -> None:
    command = [sys.executable, "-m", "kvstore", "--port=0", f"--socket={shared_agent.socket}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 1
    assert "another process listens" in result.stderr
    assert "Traceback" not in result.stderr


def test_regions_share_a_budget_and_idle_ones_make_room() -> None:
    regions = Regions(10 * 4096)
    with regions.using("a", 4096) as a:
        slots = a.tier.reserve(KEYS[:1])
        assert slots is not None
        a.tier.commit(slots)
        a.tier.unpin(slots)
        assert a.tier.num_slots == 10
        with pytest.raises(OverloadedError, match="region-gb"), regions.using("b", 4096):
            pass
    with regions.using("a", 4096) as again:
        assert again is a
        assert not again.tier.missing(KEYS[:1])
    with regions.using("b", 8192) as b:
        assert b.tier.num_slots == 5
    assert regions.used_bytes == 10 * 4096
    regions.close()


def test_the_longest_idle_region_goes_first() -> None:
    regions = Regions(3 * 4096, region_bytes=4096)
    for name in "abc":
        with regions.using(name, 4096):
            pass
    with regions.using("a", 4096):
        pass
    with regions.using("d", 4096):
        assert [region.name[0] for region in regions.all()] == ["a", "c", "d"]
    regions.close()


def test_a_worker_learns_why_it_gets_no_memory(shared_agent: Agent) -> None:
    with pytest.raises(ConfigError, match="host-tier-gb"):
        AgentHostTier(shared_agent.socket, "huge", NUM_SLOTS * BLOCK_BYTES * 2)


async def test_an_agent_without_memory_is_not_started() -> None:
    with pytest.raises(ConfigError, match="don't start one"):
        await serve(AgentConfig(host_tier_gb=0))


def test_no_agent_starts_with_the_examples_token() -> None:
    with pytest.raises(ConfigError, match="the cluster token is the example's"):
        AgentConfig(cluster_token=EXAMPLE_PREFIX)


async def test_health_is_served(shared_agent: Agent) -> None:
    from common.net.healthcheck import is_ready

    assert await is_ready(f"127.0.0.1:{shared_agent.port}", timeout_seconds=60.0)
