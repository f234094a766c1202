"""A cluster for the duration of one command; `chat` and `demo` use it if no server runs, and say so first.

Starts `mini-infer serve` as a child that cannot outlive this process and in a separate session, so that Ctrl-C in a
chat does not stop it. Its progress display goes to our standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from cli.client.api_client import API_KEY, DEFAULT_URL, ApiClient, api_key_of, server_root
from cli.cluster.child import child_command, child_environment
from cli.cluster.flags import build_parser, parse_config
from cli.cluster.plan import workers_of
from cli.cluster.ports import LOOPBACK, free_ports
from cli.gpus.placement import uses_gpu
from cli.terminal.keys import keys_kept
from common.config import SettingsParser
from common.errors import ConfigError, InvalidRequestError, UnavailableError
from common.model_files import DEFAULT_MODEL_NAME, DRY_RUN_MODEL_NAME

STOP_SECONDS = 60.0
PROBE_SECONDS = 2.0


def server_answers(url: str) -> bool:
    """Whether a server at `url` accepts requests. Other servers, without /readyz, count as accepting."""
    try:
        return httpx.get(f"{url}/readyz", timeout=PROBE_SECONDS).status_code < 500
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


class LocalServer:
    """Context manager; `url` answers once it is entered. Raises UnavailableError if the cluster cannot start."""

    def __init__(self, serve_flags: Sequence[str], port: int = 0, api_key: str = "") -> None:
        """api_key: passed in the environment, as every user can read command lines."""
        self._port = port or free_ports(1)[0]
        self._environment = os.environ | ({API_KEY: api_key} if api_key else {})
        self._flags = tuple(serve_flags)
        self.url = f"http://{LOOPBACK}:{self._port}"

    def __enter__(self) -> LocalServer:
        self._process = subprocess.Popen(
            child_command("cli", ("serve", "--host", LOOPBACK, "--port", str(self._port), *self._flags)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=child_environment(self._environment),
            text=True,
            start_new_session=True,
        )
        try:
            self._wait_ready()
        except BaseException:  # Ctrl-C and cancelled tasks, too: nothing may stay open
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _wait_ready(self) -> None:
        """Wait until `serve` reports readiness: the router alone answers as soon as one worker is ready."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready in "):
                return
        raise UnavailableError("the cluster did not start; the reason is above")

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children end with it
            self._process.wait()
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()


def port_of(url: str) -> int:
    """Return the port for a server that answers at `url`. Raises UnavailableError for another machine."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url!r}: give the server's root, such as {DEFAULT_URL}")
    if parts.scheme != "http" or parts.hostname not in (LOOPBACK, "localhost"):
        raise UnavailableError(f"no server answers at {url}, and only one on {LOOPBACK} can be started here")
    return parts.port or 80


def add_start_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `server_for` reads in addition to a client's."""
    parser.epilog = "Flags that are not listed here go to `mini-infer serve` when one is started."
    parser.add_argument("--start", action="store_true", help="start a cluster when no server answers at --url")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="a cluster with a tiny random model: started on a port of its own, or with --url as for other models",
    )


def parse_with_serve_flags(parser: SettingsParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the parser's flags, and the rest for `serve`. Ends the program if neither knows a flag."""
    arguments, serve_flags = parser.parse_known_args(argv)
    if unknown := build_parser(parser.prog).parse_known_args(serve_flags)[1]:
        parser.unrecognized(unknown)
    return arguments, serve_flags


@contextlib.contextmanager
def server_for(arguments: argparse.Namespace, serve_flags: list[str], may_ask: bool) -> Iterator[tuple[str, bool]]:
    """Yield (url, whether it was started here). Raises UnavailableError if none runs and none may be started."""
    url = server_root(arguments.url or DEFAULT_URL)
    is_private = arguments.dry_run and not arguments.url  # whatever runs at the default address
    if not is_private and server_answers(url):
        if serve_flags:
            told = " ".join(serve_flags)
            raise InvalidRequestError(f"a server runs at {url}, which cannot take {told} now: stop it first")
        yield url, False
        return
    model_flags = ["--model", arguments.model] if arguments.model else []
    flags = [*(["--dry-run"] if arguments.dry_run else []), *model_flags, *serve_flags]
    server = LocalServer(flags, 0 if is_private else port_of(url), arguments.api_key)
    what = f"{describe_cluster(flags)}; it stops when this command ends"
    if is_private or arguments.start:
        _say(f"starting a cluster at {server.url}: {what}")
    elif not (may_ask and _may_start(f"No server answers at {url}. One can be started here: {what}.")):
        raise UnavailableError(f"no server answers at {url}: start one with `mini-infer serve`, or add --start")
    keyboard = keys_kept(sys.stdin.fileno()) if sys.stdin.isatty() else contextlib.nullcontext()
    with keyboard, server as started:
        yield started.url, True


@contextlib.contextmanager
def find_or_start(
    arguments: argparse.Namespace, serve_flags: list[str], may_ask: bool
) -> Iterator[tuple[ApiClient, str]]:
    """Yield a client of that server, and the model to ask for."""
    with (
        server_for(arguments, serve_flags, may_ask) as (url, is_ours),
        ApiClient(url, api_key_of(arguments)) as client,
    ):
        yield client, client.choose_model("" if is_ours else arguments.model)


def describe_cluster(serve_flags: Sequence[str]) -> str:
    """Describe the model and workers that `mini-infer serve` would start. Downloads nothing. Raises ConfigError."""
    config = parse_config(serve_flags, os.environ)
    model = "a tiny random model" if config.engine.model == DRY_RUN_MODEL_NAME else config.engine.model
    if uses_gpu(config.engine.device):  # `serve` shows the GPUs of each worker once it has read the model's size
        return f"{model or DEFAULT_MODEL_NAME} on this machine's GPUs"
    return f"{model or DEFAULT_MODEL_NAME} on this machine's CPU, {workers_of(config)}"


def _say(text: str) -> None:
    console = Console(stderr=True)
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _may_start(what: str) -> bool:
    _say(what)
    try:
        return input("Start it? [Y/n] ").strip().lower() in ("", "y", "yes")
    except EOFError:
        return False
