"""A router in this process, on a real port and with scripted workers, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson
import uvicorn
from openai import AsyncOpenAI

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from common.text.tokenizer import Tokenizer
from common.wings import has_wing
from router.app import create_app
from router.config import HttpConfig, RouterConfig
from router.gateway import Gateway
from router.served_model import LoadedModel, ServedModel, serve_models
from router.server import listen, protocol_for
from router.workers.worker_link import WorkerLink
from tests.harness.clients import async_client
from tests.harness.scripted_worker import Script, ScriptedWorker

DRY_RUN = load_tokenizer(resolve_model("dry-run"))
TWO_CHOICES: dict[str, Any] = {"n": 2} if has_wing("router.several_choices") else {}


@dataclass
class Cluster:
    """A router with its workers and clients."""

    gateway: Gateway
    prefill: list[ScriptedWorker]
    decode: list[ScriptedWorker]
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    port: int
    tokenizer: Tokenizer = field(default=DRY_RUN)

    @property
    def model(self) -> ServedModel:
        """The default model."""
        return self.gateway.models[0]

    async def chat(self, text: str = "Hello", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "seed": 1, **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "abc", **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 8, "seed": 1, **fields}
        return await self.http.post("/v1/completions", json=body)

    async def events(self, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        """Stream a request; return its events, parsed, of which the last is "[DONE]"."""
        if "prompt" not in body and "messages" not in body:
            body["messages"] = [{"role": "user", "content": "Hello"}]
        body = {"max_tokens": 8, "seed": 1, "stream": True, **body}
        async with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            return [event async for event in sse_events(response)]

    async def until(self, condition: Any, timeout_seconds: float = 60.0) -> None:
        """Wait for a condition. The timeout is long, for busy machines: only failing tests reach it."""
        async with asyncio.timeout(timeout_seconds):
            while not condition():
                await asyncio.sleep(0.005)

    def is_quiet(self) -> bool:
        """Whether no request is open anywhere."""
        dispatchers = [model.dispatcher for model in self.gateway.models]
        links = self.gateway.workers.links
        sessions = [session for worker in (*self.prefill, *self.decode) for session in worker.sessions]
        return not (
            any(dispatcher.num_running or dispatcher.num_waiting for dispatcher in dispatchers)
            or any(has_work(link) for link in links)
            or any(session.running for session in sessions)
        )


def has_work(link: WorkerLink) -> bool:
    """Whether the router has open legs on a worker, or predicts work from them."""
    if not has_wing("router.costs"):
        return bool(link.num_open)
    from router.costs.meter import meter_of

    return bool(link.num_open or meter_of(link).view().queued_prefill_tokens)


async def sse_events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line:
            assert line.startswith("data: ")
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else orjson.loads(data)


def text_of(events: list[Any], index: int = 0) -> str:
    """Return the text of one choice from a stream's events."""
    pieces = []
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) and "choices" in event else ():
            if choice["index"] == index:
                pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(pieces)


@asynccontextmanager
async def cluster(
    num_prefill: int = 0,
    num_decode: int = 1,
    script: Script | None = None,
    info: dict[str, Any] | None = None,
    tokenizer: Tokenizer = DRY_RUN,
    wait: bool = True,
    http: HttpConfig | None = None,
    models: Sequence[LoadedModel] = (),
    others: Sequence[ScriptedWorker] = (),
    adapters: Sequence[str] = (),
    send_buffer_bytes: int = 0,
    **config: Any,
) -> AsyncIterator[Cluster]:
    """Run a router with scripted workers, each with a copy of `script`.

    models: served instead of dry-run; others: further workers; adapters: of the first model.
    send_buffer_bytes: of each connection; 0: the kernel's default.
    """
    plan = vars(script or Script())
    facts = {"tokenizer_hash": tokenizer.tokenizer_hash(), **(info or {})}
    prefill = [ScriptedWorker("prefill", f"p{i}", Script(**plan), **facts) for i in range(num_prefill)]
    decode = [ScriptedWorker("decode", f"d{i}", Script(**plan), **facts) for i in range(num_decode)]
    prefill += [worker for worker in others if worker.role == "prefill"]
    decode += [worker for worker in others if worker.role == "decode"]
    for worker in (*prefill, *decode):
        await worker.start()
    addresses = {
        "prefill": ",".join(worker.address for worker in prefill),
        "decode": ",".join(worker.address for worker in decode) or "127.0.0.1:1",
    }
    # Long, because the workers are in this process, which may wait for a core.
    patience = {"worker_timeout_seconds": 60.0} if has_wing("router.hangs") else {}
    settings = RouterConfig(model="dry-run", **{**addresses, **patience, **config})
    served = serve_models(settings, models or [LoadedModel(settings.served_model_name, "dry-run", tokenizer)])
    base = served[0]
    served += [replace(base, name=f"{base.name}:{name}", aliases=(), adapter=name) for name in adapters]
    gateway = Gateway(settings, served, http)
    listener = listen("127.0.0.1", 0)  # sets TCP_NODELAY, without which an answer waits 40 ms for an ACK
    if send_buffer_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    port = listener.getsockname()[1]
    server = _Server(
        uvicorn.Config(
            create_app(gateway),
            http=protocol_for(http or HttpConfig()),
            ws="none",
            log_config=None,
            access_log=False,
        )
    )
    serving = asyncio.create_task(server._serve([listener]))
    url = f"http://127.0.0.1:{port}"
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client,
            async_client(url) as openai,
        ):
            async with asyncio.timeout(120):
                while not (server.started and (not wait or _num_usable(gateway) == len(prefill) + len(decode))):
                    assert not serving.done()
                    await asyncio.sleep(0.005)
            yield Cluster(gateway, prefill, decode, client, openai, port, tokenizer)
    finally:
        server.end()
        await serving
        listener.close()
        for worker in (*prefill, *decode):
            if worker.server is not None:
                await worker.kill()


def replying(
    text: str, tokens_per_step: int = 1, template: str = "", **options: Any
) -> AbstractAsyncContextManager[Cluster]:
    """Run a cluster whose workers reply `text`. template: chat template; options: for `Script` and `cluster`."""
    behaviour = {name: options.pop(name) for name in vars(Script()) if name in options}
    script = Script(reply=list(text.encode()), tokens_per_step=tokens_per_step, **behaviour)
    if template:
        options["tokenizer"] = DRY_RUN.with_templates({"default": template})
    return cluster(script=script, info={"max_model_len": 4096}, **options)


class _Server(uvicorn.Server):
    """Uvicorn's server, but without two sleeps of 0.1 s at its end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ends = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ends.set()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), 0.1)
            counter += 1

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; requests have a second to end."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.002)
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


def _num_usable(gateway: Gateway) -> int:
    return sum(link.is_usable for link in gateway.workers.links)
