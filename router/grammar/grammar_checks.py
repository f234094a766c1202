"""Check clients' grammars in a process of their own: compiling is in a client's hands, and nothing interrupts it.

The process forks for each check, under limits of processor time and memory. Whatever a grammar does to that copy is
its refusal, and costs the router nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from common.errors import InvalidRequestError, UnavailableError
from common.grammar.grammar import TOO_COMPLEX, check_grammar

CPU_SECONDS = 0.25  # of a check; of 1,232 schemas that people wrote, the slowest takes 0.04
MEMORY_BYTES = 256 << 20  # of a check, beyond what the process has
NICENESS = 10  # requests that run come first
NUM_KNOWN = 256  # grammars whose check is remembered


class GrammarChecks:
    """Ask the process, one grammar at a time. Usable from any event loop; starts the process when it is needed."""

    def __init__(self) -> None:
        # Why a grammar is refused, or nothing, by its digest, as one may have a million characters; last used last.
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar-checks")

    def __len__(self) -> int:
        """Grammars whose check is remembered: at most NUM_KNOWN."""
        return len(self._known)

    async def check(self, grammar: str) -> None:
        """Raise InvalidRequestError for a grammar that cannot be used, or takes too much."""
        refusal = self._recall(grammar)
        if refusal is None:
            refusal = await asyncio.wrap_future(self._executor.submit(self._ask_once, grammar))
        if refusal:
            raise InvalidRequestError(refusal)

    def close(self) -> None:
        """End the process."""
        self._executor.shutdown()
        self._end()

    def _recall(self, grammar: str) -> str | None:
        digest = _digest(grammar)
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
            return self._known.get(digest)

    def _ask_once(self, grammar: str) -> str:
        refusal = self._recall(grammar)
        if refusal is None:
            refusal = self._ask(grammar)
            with self._lock:
                self._known[_digest(grammar)] = refusal
                if len(self._known) > NUM_KNOWN:
                    self._known.popitem(last=False)
        return refusal

    def _ask(self, grammar: str) -> str:
        if self._process is None:
            atexit.register(self._end)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "router.grammar.grammar_checks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _send(self._process.stdin.fileno(), grammar.encode("utf-8", "replace"))
            return _receive(self._process.stdout.fileno()).decode()
        except (OSError, EOFError):
            self._end()  # the next one gets another process
            raise UnavailableError("grammars cannot be checked now") from None

    def _end(self) -> None:
        atexit.unregister(self._end)
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "replace")).digest()


def _send(file: int, message: bytes) -> None:
    whole = memoryview(len(message).to_bytes(4, "little") + message)
    while whole:
        whole = whole[os.write(file, whole) :]


def _receive(file: int) -> bytes:
    return _read(file, int.from_bytes(_read(file, 4), "little"))


def _read(file: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(file, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _refusal(grammar: str) -> str:
    try:
        check_grammar(grammar)
    except InvalidRequestError as error:
        return str(error)
    return ""


def _check_in_copy(grammar: str) -> str:
    """Fork, check there, and say why the grammar is refused."""
    reads, writes = os.pipe()
    copy = os.fork()
    if copy == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what llguidance says when it aborts
            with open("/proc/self/statm") as file:
                size = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
            _send(writes, _refusal(grammar).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writes)
    try:
        refusal = _receive(reads).decode()
    except EOFError:
        refusal = ""
    os.close(reads)
    _, status = os.waitpid(copy, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return f"{TOO_COMPLEX}: it takes more than {CPU_SECONDS} s to compile"
    return refusal if status == 0 else f"{TOO_COMPLEX}: it takes more than {MEMORY_BYTES >> 20} MiB to compile"


def main() -> None:
    """Answer on standard output what comes in on standard input, until that ends: with the router."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the router
    _refusal("regex:ready")  # what is loaded now is in every copy
    while True:
        try:
            grammar = _receive(0).decode()
        except EOFError:
            return
        _send(1, _check_in_copy(grammar).encode())


if __name__ == "__main__":
    main()
