"""A closed loop of clients on a thread. A test sets how many are active; they go on whatever happens."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter

import httpx

STREAMED = 0.1  # share of streamed answers
PAUSE_SECONDS = 1.0  # pause of a client after a refusal


class BackgroundLoad:
    """Sends prompts with shared prefixes and different ends, in few letters, so that drafts are accepted.

    Uses plain sockets: with an HTTP library, the clients would be slower than the cluster.
    """

    def __init__(self, url: str, num_clients: int) -> None:
        self.level = 0  # number of clients that are active now
        self.statuses: Counter[int | str] = Counter()
        self._address = httpx.URL(url)
        self._num_clients = num_clients
        self._is_stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    async def _run(self) -> None:
        tasks = [asyncio.create_task(self._ask_again(number)) for number in range(self._num_clients)]
        while not self._is_stopping:
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_again(self, number: int) -> None:
        rng = random.Random(number)
        while True:
            if number >= self.level:
                await asyncio.sleep(0.1)
                continue
            status = await self._ask(rng)
            self.statuses[status] += 1
            if status != 200:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, rng: random.Random) -> int | str:
        beginning = f"{rng.randrange(24)} " + "the shared beginning of many prompts " * rng.choice([2, 5])
        body = {
            "prompt": beginning + "x" * rng.randrange(60), "max_tokens": rng.choice([200, 400]), "ignore_eos": True,
            "temperature": 0.0, "allowed_token_ids": [97, 98, 99],
            "stream": rng.random() < STREAMED,
        }  # fmt: skip
        content = json.dumps(body)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(30.0):
                reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
                try:
                    writer.write((head + content).encode())
                    answer = await reader.read()
                finally:
                    writer.close()
            return int(answer.split(None, 2)[1])
        except (OSError, TimeoutError, IndexError) as error:  # IndexError: closed without an answer
            return type(error).__name__
