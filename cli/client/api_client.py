"""The few calls that commands make to an OpenAI-compatible server: list models, get or stream an answer."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Generator, Iterator
from typing import Any, Self

import httpx

from cli.client.event_stream import EventStream, RequestRecord, StreamError, message_of
from common.errors import ConfigError, InvalidRequestError, MiniInferError, UnavailableError

Message = dict[str, str]
DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY = "MINI_INFER_API_KEY"
LIST_SECONDS = 10.0


class ApiError(MiniInferError):
    """The server refused the request or broke the stream; the text is the server's."""


def server_root(url: str) -> str:
    """Return the server's root; OpenAI's clients are given it with /v1 at the end."""
    return url.rstrip("/").removesuffix("/v1")


def speed_of(record: RequestRecord) -> float:
    """Tokens per second after the first token; 0 if there are none."""
    return 1.0 / record.tpot if record.chunk_times and record.tpot else 0.0


def describe(record: RequestRecord) -> str:
    """Return one line about an answer, for people."""
    first = f"first token {record.ttft * 1e3:.0f} ms, " if record.chunk_times else ""
    rate = f"{speed_of(record):.1f} tokens/s, " if speed_of(record) else ""
    return f"{first}{rate}{record.num_output_tokens} tokens"


class ApiClient:
    """Context manager around one HTTP client. All errors are MiniInferErrors."""

    def __init__(self, url: str, api_key: str = "", timeout_seconds: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = server_root(url)
        timeout = httpx.Timeout(timeout_seconds, connect=5.0)
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url {url!r}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def choose_model(self, wanted: str = "") -> str:
        """Return the wanted model, or the first one. Raises InvalidRequestError if it is not served."""
        try:
            names = [str(model["id"]) for model in self.get_json("/v1/models")["data"]]
        except (ValueError, LookupError, TypeError):  # not JSON, or not OpenAI's
            names = []
        if not names:
            raise ApiError(f"{self.url}/v1/models lists no model")
        if wanted and wanted not in names:
            raise InvalidRequestError(
                f"the server at {self.url} serves {', '.join(names)}, not {wanted}: leave out --model, or stop it"
            )
        return wanted or names[0]

    def get_json(self, path: str) -> Any:
        """Return the JSON of a GET. Raises UnavailableError, ApiError, and ValueError if the answer is not JSON."""
        try:
            reply = self._http.get(path, timeout=LIST_SECONDS)
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        raise_for_status(reply)
        return reply.json()

    def _unavailable(self, error: httpx.HTTPError) -> UnavailableError:
        return UnavailableError(
            f"no server answers at {self.url} ({error}): start one with `mini-infer serve`, or give --url"
        )

    def stream_chat(
        self, model: str, messages: list[Message], record: RequestRecord, **params: Any
    ) -> Generator[str, None, None]:
        """Yield pieces of the answer as they come; closing the iterator cancels the request. Fills `record`.

        An empty piece means that there is more reasoning in the record.
        """
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | params
        begin = time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise_for_status(reply)
                events = EventStream(record)
                for data in reply.iter_bytes():
                    record.end = time.perf_counter() - begin
                    num_reasoned = len(record.reasoning)
                    text = events.read(data, record.end)
                    if text or len(record.reasoning) > num_reasoned:
                        yield text
                    if events.is_complete:
                        return
        except StreamError as error:
            raise ApiError("the server sent no JSON" if error.event is None else _message(error.event)) from error
        except httpx.HTTPError as error:
            raise UnavailableError(f"the connection to {self.url} broke: {error}") from error

    def chat(self, model: str, messages: list[Message], **params: Any) -> dict[str, Any]:
        """Return the message of an answer that is not streamed."""
        try:
            reply = self._http.post("/v1/chat/completions", json={"model": model, "messages": messages} | params)
            raise_for_status(reply)
            return dict(reply.json()["choices"][0]["message"])
        except httpx.HTTPError as error:
            raise UnavailableError(f"the connection to {self.url} broke: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ApiError(f"{self.url}/v1/chat/completions answers with something else") from error


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `client_for` reads."""
    parser.add_argument("--url", default="", help=f"the server (default: {DEFAULT_URL})")
    # $MINI_INFER_MODEL is for `serve`; a running server has its own model.
    parser.add_argument("--model", default="", help="which model (default: the server's first)")
    parser.add_argument("--api-key", default="", help=f"the server's key (default: ${API_KEY})")


def api_key_of(arguments: argparse.Namespace) -> str:
    return arguments.api_key or os.environ.get(API_KEY, "")


@contextlib.contextmanager
def client_for(arguments: argparse.Namespace) -> Iterator[tuple[ApiClient, str]]:
    """Yield a client of the server that the flags name, and the model to ask for."""
    with ApiClient(arguments.url or DEFAULT_URL, api_key_of(arguments)) as client:
        yield client, client.choose_model(arguments.model)


def first_model(url: str, api_key: str = "") -> str:
    """Return the first model that a server lists. Raises UnavailableError or ApiError."""
    with ApiClient(url, api_key) as client:
        return client.choose_model()


def raise_for_status(reply: httpx.Response) -> None:
    """Raise ApiError with the text of an answer that has been read, unless its status is 200."""
    if reply.status_code == 200:
        return
    try:
        text = _message(reply.json())
    except ValueError:
        text = reply.reason_phrase
    hint = "; give the server's key with --api-key" if reply.status_code == 401 else ""
    raise ApiError(f"{text} (HTTP {reply.status_code}){hint}")


def _message(body: Any) -> str:
    return message_of(body) or "the server gave no reason"
