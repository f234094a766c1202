"""Service processes, forked from a process that has imported their modules, which saves seconds of imports.

Each has its own id, session, signals and children, and runs the `main` of `python -m MODULE`. A service that will
start children forks them before it has threads; they wait for the command, environment and descriptors that it passes
to Popen. Only the command line in /proc differs. tests/cli/cluster starts every service by its real command.
"""

from __future__ import annotations

import fcntl
import importlib
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ENGINE_PROCESS, FOLLOWER = "worker.engine_process.main", "engine.tensor_parallel.follower"
SERVICES = ("tests.harness.preloaded",)
MAX_MESSAGE_BYTES = 1 << 17  # limit for a command with its environment
PARKED = 512  # descriptors are moved to numbers from here on first


def fork_service(argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> BaseProcess:
    """Start the service that `python -m argv` runs, with this environment; append its output to `log_path`."""
    log_path.touch()
    return fork(_run_service, [*argv], {**env}, log_path)


def fork(target: Callable[..., None], *args: Any, preloaded: Sequence[str] = SERVICES) -> BaseProcess:
    """Start `target` in a process forked from a process without threads that has imported `preloaded`.

    All calls in a pytest process must preload the same modules.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preloaded])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # read when torch is imported
        ensure_running()
    process = context.Process(target=target, args=args, daemon=True)  # ends with pytest at the latest
    process.start()
    return process


def fork_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the follower ranks of this process's engines from now on, instead of starting a Python for each."""
    start = subprocess.Popen

    def popen(command: Any, *args: Any, **kwargs: Any) -> Any:
        if FOLLOWER not in command:
            return start(command, *args, **kwargs)
        argv, descriptors = command[command.index(FOLLOWER) :], kwargs["pass_fds"]
        return _Forked(fork(_run_follower, argv, {**os.environ}, [*map(_Descriptor, descriptors)], descriptors))

    monkeypatch.setattr(subprocess, "Popen", popen)


class _Descriptor:
    """An open file; the process that receives it gets the number of a duplicate."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (reduction.DupFd(self._number),)


def _detach(sent: Any) -> int:
    number: int = sent.detach()
    return number


class _Forked:
    """A forked process with the interface of Popen."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid
        self.kill = process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(FOLLOWER, timeout or 0.0)
        return self._process.exitcode


def _run_follower(
    argv: Sequence[str], env: Mapping[str, str], received: Sequence[int], numbers: Sequence[int]
) -> None:
    _number(received, numbers)
    _run_module([*argv], env)


def _run_service(argv: list[str], env: dict[str, str], log_path: Path) -> None:
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if argv[0] in ("prefill_service", "decode_service"):
        degrees = dict(re.findall(r"--(tp|pp)=(\d+)", " ".join(argv)))  # the last value of a flag counts
        num_followers = int(degrees.get("tp", 1)) * int(degrees.get("pp", 1)) - 1
        _fork_children([ENGINE_PROCESS], [FOLLOWER] * num_followers)
    elif argv[0] == "worker.ranks.stage":
        _fork_children([FOLLOWER])
    _run_module(argv, env)


def _run_module(argv: list[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    Path("/proc/self/comm").write_text(argv[0][-15:])  # what `followers_of` (processes.py) looks for
    name = argv[0] if "." in argv[0] else f"{argv[0]}.__main__"
    sys.exit(importlib.import_module(name).main())


def _fork_children(modules: Sequence[str], of_children: Sequence[str] = ()) -> None:
    """Fork one process per module, and use it when this process would start `python -m` with the module."""
    waiting: list[tuple[str, int, socket.socket]] = []
    for module in modules:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (pid := os.fork()) == 0:
            for link in (ours, *(link for _, _, link in waiting)):
                link.close()
            _fork_children(of_children)
            _wait_for_command(theirs)
        theirs.close()
        waiting.append((module, pid, ours))
    start = subprocess.Popen

    def popen(command: Any, *args: Any, **kwargs: Any) -> Any:
        for each in waiting:
            module, pid, link = each
            if module in command:
                waiting.remove(each)
                _send_command(link, command[command.index(module) :], kwargs.get("env"), kwargs["pass_fds"])
                return _Child(pid)
        return start(command, *args, **kwargs)

    if waiting:
        subprocess.Popen = popen  # type: ignore[misc,assignment]


def _send_command(
    link: socket.socket, argv: Sequence[str], env: Mapping[str, str] | None, descriptors: Sequence[int]
) -> None:
    parts = [
        *map(str, descriptors),
        "",
        *argv,
        "",
        *(f"{name}={value}" for name, value in (env or os.environ).items()),
    ]
    with link:
        socket.send_fds(link, ["\0".join(parts).encode()], descriptors)


def _wait_for_command(link: socket.socket) -> None:
    """Receive a command, run it, and end this process."""
    with link:
        message, received, _, _ = socket.recv_fds(link, MAX_MESSAGE_BYTES, 64)
    if not message:  # the parent has ended
        sys.exit(0)
    numbers, argv, env = (part.split("\0") for part in message.decode().split("\0\0", 2))
    _number(received, [*map(int, numbers)])
    _run_module(argv, dict(each.split("=", 1) for each in env))


def _number(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Renumber received descriptors to their numbers in the parent."""
    parked = [fcntl.fcntl(each, fcntl.F_DUPFD, PARKED) for each in received]
    for each in received:
        os.close(each)
    for each, number in zip(parked, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


class _Child(subprocess.Popen):
    """A Popen of a process that runs already."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self.stdin = self.stdout = self.stderr = None
        self.args = ()
        self._child_created, self._waitpid_lock, self._sigint_wait_secs = True, threading.Lock(), 0.25
