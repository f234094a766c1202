"""Workers that a host name resolves to, which come and go."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

import router.discovery  # noqa: F401  what tests/wings.py sees: this file goes with the wing
from kvstore.types import WorkerId
from tests.harness.router import cluster, text_of
from tests.harness.scripted_worker import Script, ScriptedWorker


class Names:
    """A name server for one name; an empty list: it does not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.hosts = list(hosts)
        self._getaddrinfo = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)
        monkeypatch.setattr("router.discovery.names.RESOLVE_INTERVAL_SECONDS", 0.02)

    def __call__(self, host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host != "decode.test":
            return self._getaddrinfo(host, port, *arguments, **options)
        if not self.hosts:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.hosts]


async def test_workers_behind_a_name_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "127.0.0.1")
    async with cluster() as c:
        control = text_of(await c.events(max_tokens=400))
    first = await ScriptedWorker("decode", "first", Script(delay_seconds=0.02)).start()
    second = ScriptedWorker("decode", "second", Script(delay_seconds=0.01))
    second.host, second.port = "127.0.0.2", first.port
    await second.start()
    try:
        async with cluster(num_decode=0, decode=f"decode.test:{first.port}", wait=False) as c:
            workers = c.model.workers
            await c.until(lambda: [link.worker_id for link in workers.usable("decode")] == ["first"])
            stream = asyncio.create_task(c.events(max_tokens=400))
            await c.until(lambda: first.num_tokens > 5)

            names.hosts = ["127.0.0.1", "127.0.0.2"]  # one appears
            await c.until(lambda: len(workers.usable("decode")) == 2)

            names.hosts = ["127.0.0.2"]  # one leaves, with an open request
            await c.until(lambda: [link.worker_id for link in workers.usable("decode")] == ["second"])
            assert not stream.done()
            assert len(workers.links) == 2
            for _ in range(3):
                assert (await c.chat(max_tokens=1)).status_code == 200
            assert (len(first.submits), len(second.submits)) == (1, 3)
            first.script.delay_seconds = 0.0
            assert text_of(await stream) == control  # it ends where it began
            await c.until(lambda: len(workers.links) == 1)
            await c.until(lambda: not first.sessions)
            assert workers.index.num_worker_keys(WorkerId("first")) == 0

            names.hosts = []  # the name server fails: whoever was there stays
            await asyncio.sleep(0.1)
            assert [link.worker_id for link in workers.usable("decode")] == ["second"]
            assert (await c.chat(max_tokens=1)).status_code == 200

            names.hosts = ["127.0.0.1"]  # all are replaced at once
            await c.until(lambda: [link.worker_id for link in workers.links] == ["first"])
            await c.until(lambda: bool(workers.usable("decode")))
            assert (await c.chat(max_tokens=1)).status_code == 200
    finally:
        await first.kill()
        await second.kill()
