import argparse
import functools
import os
import queue
import socket
import threading

import pytest

from cli.client.api_client import add_client_arguments
from cli.cluster.flags import parse_config
from cli.load import demo
from cli.local_cluster.local_server import (
    LocalServer,
    add_start_arguments,
    find_or_start,
    port_of,
    server_answers,
    server_for,
)
from cli.terminal import chat
from common.errors import InvalidRequestError, UnavailableError


def arguments(*flags):
    parser = argparse.ArgumentParser()
    add_client_arguments(parser)
    add_start_arguments(parser)
    return parser.parse_args(flags)


class FakeServer:
    """Records its start with its arguments, and its stop."""

    def __init__(self, log, flags, port=0, api_key=""):
        self.log = log
        self.told = (flags, port)
        self.api_key = api_key
        self.url = f"http://127.0.0.1:{port or 1234}"

    def __enter__(self):
        self.log.append(self.told)
        return self

    def __exit__(self, *_):
        self.log.append("stopped")


@pytest.fixture
def no_server(monkeypatch):
    monkeypatch.setattr("cli.local_cluster.local_server.server_answers", lambda _url: False)
    log = []
    monkeypatch.setattr("cli.local_cluster.local_server.LocalServer", functools.partial(FakeServer, log))
    return log


def answering(reply):
    """Answer one connection; return its port, and the first data that it receives."""
    listener, received = socket.create_server(("127.0.0.1", 0)), queue.SimpleQueue()

    def answer():
        with listener, listener.accept()[0] as connection:
            received.put(connection.recv(1 << 16))
            connection.sendall(reply)

    threading.Thread(target=answer, daemon=True).start()
    return listener.getsockname()[1], received


@pytest.mark.parametrize(("status", "answers"), [("200 OK", True), ("404 Not Found", True), ("503 Busy", False)])
def test_a_server_answers_unless_it_has_to_be_waited_for(monkeypatch, status, answers):
    """This includes other servers, which have no /readyz."""
    monkeypatch.setattr("cli.local_cluster.local_server.PROBE_SECONDS", 60.0)
    port, received = answering(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
    assert server_answers(f"http://127.0.0.1:{port}") == answers
    assert received.get(timeout=60).startswith(b"GET /readyz ")


def test_https_is_spoken_to_https(monkeypatch):
    monkeypatch.setattr("cli.local_cluster.local_server.PROBE_SECONDS", 60.0)
    port, received = answering(b"no TLS")
    assert not server_answers(f"https://127.0.0.1:{port}")
    assert received.get(timeout=60).startswith(b"\x16\x03")


def test_no_server_answers_where_none_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert not server_answers(f"http://127.0.0.1:{port}")
    assert not server_answers("http://127.0.0.1:99999")


def test_a_running_server_is_used_and_takes_no_flags(monkeypatch):
    monkeypatch.setattr("cli.local_cluster.local_server.server_answers", lambda _url: True)
    with server_for(arguments("--url", "http://h:1"), [], may_ask=False) as found:
        assert found == ("http://h:1", False)
    with (
        pytest.raises(InvalidRequestError, match="--decode 2"),
        server_for(arguments(), ["--decode", "2"], may_ask=False),
    ):
        pass


def test_a_flag_of_nobody_is_refused_before_anything_else(monkeypatch, capsys):
    monkeypatch.setattr("cli.local_cluster.local_server.server_answers", lambda _url: pytest.fail("asked"))
    for command in (chat, demo):
        with pytest.raises(SystemExit):
            command.run(["--modle", "m", "--decode", "2"])
        (line,) = capsys.readouterr().err.splitlines()
        assert f"mini-infer {command.__name__.rpartition('.')[2]}: error: unrecognized arguments: --modle m" in line
        assert "did you mean --model?" in line


def test_the_url_may_be_what_clients_of_openai_are_given(no_server, monkeypatch):
    monkeypatch.setattr("cli.local_cluster.local_server.server_answers", lambda url: url == "http://h:1")
    with server_for(arguments("--url", "http://h:1/v1/"), [], may_ask=False) as found:
        assert found == ("http://h:1", False)


def test_one_is_started_at_the_same_address_and_stopped(no_server):
    flags = arguments("--start", "--model", "m", "--url", "http://127.0.0.1:8055")
    with server_for(flags, ["--decode=2"], may_ask=False) as found:
        assert found == ("http://127.0.0.1:8055", True)
    assert no_server == [(["--model", "m", "--decode=2"], 8055), "stopped"]


def test_a_model_in_the_environment_is_for_a_server_that_is_started(monkeypatch):
    monkeypatch.setenv("MINI_INFER_MODEL", "/models/other")
    assert arguments().model == ""
    assert arguments("--model", "m").model == "m"
    assert parse_config([], dict(os.environ)).engine.model == "/models/other"


def test_the_key_is_sent_and_does_not_stand_on_a_command_line(no_server, monkeypatch):
    monkeypatch.setattr(
        "cli.local_cluster.local_server.ApiClient.choose_model",
        lambda client, _: client._http.headers["Authorization"],
    )
    for flags in (["--api-key", "one"], []):
        monkeypatch.setenv("MINI_INFER_API_KEY", "two")
        with find_or_start(arguments("--dry-run", *flags), [], may_ask=False) as (_, sent):
            assert sent == ("Bearer one" if flags else "Bearer two")
    assert no_server == [(["--dry-run"], 0), "stopped"] * 2
    server = LocalServer(["--dry-run"], 1, "one")
    assert server._environment["MINI_INFER_API_KEY"] == "one"


def test_dry_run_starts_its_own_and_says_what(no_server, monkeypatch, capsys):
    monkeypatch.setattr("cli.local_cluster.local_server.server_answers", lambda _url: True)  # at the default address
    with server_for(arguments("--dry-run"), ["--decode=2"], may_ask=False) as (_, is_ours):
        assert is_ours
        told = "a tiny random model on this machine's CPU, 1 prefill, 2 decode; it stops when this command ends\n"
        assert capsys.readouterr().err == f"starting a cluster at http://127.0.0.1:1234: {told}"
    assert no_server[0] == (["--dry-run", "--decode=2"], 0)


def test_dry_run_with_a_url_talks_to_it_and_starts_nothing(no_server, monkeypatch, capsys):
    wanted = arguments("--dry-run", "--url", "http://127.0.0.1:8055")
    with (
        pytest.raises(UnavailableError, match=r"127\.0\.0\.1:8055: start one"),
        server_for(wanted, [], may_ask=False),
    ):
        pass
    monkeypatch.setattr("cli.local_cluster.local_server.server_answers", lambda url: url == wanted.url)
    with server_for(wanted, [], may_ask=False) as found:
        assert found == (wanted.url, False)
    assert (no_server, capsys.readouterr().err) == ([], "")


@pytest.mark.parametrize(("answer", "starts"), [("", True), ("y", True), ("n", False)])
def test_a_person_is_asked_before_anything_starts(no_server, monkeypatch, capsys, answer, starts):
    told = []

    def ask(question):
        told.append((capsys.readouterr().err, list(no_server)))
        return answer

    monkeypatch.setattr("builtins.input", ask)
    if starts:
        with server_for(arguments(), [], may_ask=True):
            pass
    else:
        with pytest.raises(UnavailableError, match="add --start"), server_for(arguments(), [], may_ask=True):
            pass
    assert bool(no_server) is starts
    ((text, started_before),) = told
    assert "SmolLM2-135M-Instruct on this machine's CPU, 1 prefill, 1 decode; it stops when" in text
    assert not started_before


def test_nobody_to_ask_and_other_machines(no_server):
    with pytest.raises(UnavailableError, match="add --start"), server_for(arguments(), [], may_ask=False):
        pass
    with pytest.raises(UnavailableError, match="only one on"):
        port_of("http://example.org:8000")
    assert (port_of("http://localhost:9"), port_of("http://127.0.0.1")) == (9, 80)
