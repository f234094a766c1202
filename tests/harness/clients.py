"""HTTP and OpenAI clients for tests. They load no certificates, which would take 25 ms for each client."""

from __future__ import annotations

from functools import partial

import httpx
import openai

API_KEY = "none"  # sent by all clients; tests may give it to a router
get = partial(httpx.get, timeout=60.0, verify=False)
post = partial(httpx.post, timeout=60.0, verify=False)


class _Client(openai.DefaultHttpxClient):
    def __del__(self) -> None:
        self.close()  # as openai's own client does; few tests close their client


def openai_client(url: str) -> openai.OpenAI:
    plain = _Client(verify=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=300.0, http_client=plain)


def async_client(url: str) -> openai.AsyncOpenAI:
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=300.0, http_client=plain)
