"""Clients that ask a cluster in a closed loop on a thread, as many at a time as a test wants, whatever happens."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

import httpx

STREAMED = 0.1  # share of answers: reading all of them so would keep this thread busier than the cluster
PAUSE_SECONDS = 1.0  # of a client that was refused


class BackgroundLoad:
    """Prompts of shared beginnings with unlike ends, in few letters, so that drafts are accepted."""

    def __init__(self, url: str, num_clients: int) -> None:
        self.level = 0  # how many of the clients may ask now
        self.statuses: Counter[int | str] = Counter()
        self._url = url
        self._num_clients = num_clients
        self._is_stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self._num_clients)
        async with httpx.AsyncClient(base_url=self._url, timeout=30.0, limits=limits) as client:
            tasks = [asyncio.create_task(self._ask_again(client, number)) for number in range(self._num_clients)]
            while not self._is_stopping:
                await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_again(self, client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while True:
            if number >= self.level:
                await asyncio.sleep(0.1)
                continue
            status = await self._ask(client, rng)
            self.statuses[status] += 1
            if status != 200:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, client: httpx.AsyncClient, rng: random.Random) -> int | str:
        beginning = f"{rng.randrange(24)} " + "the shared beginning of many prompts " * rng.choice([2, 5])
        body = {
            "prompt": beginning + "x" * rng.randrange(60), "max_tokens": rng.choice([200, 400]), "ignore_eos": True,
            "temperature": 0.0, "allowed_token_ids": [97, 98, 99],
            "stream": rng.random() < STREAMED,
        }  # fmt: skip
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass
                return answer.status_code
        except httpx.HTTPError as error:
            return type(error).__name__
