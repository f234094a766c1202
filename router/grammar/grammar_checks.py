"""Check clients' grammars in a separate process, since clients decide what is compiled and nothing interrupts it.

The process forks for each check, with limits on CPU time and memory. If a grammar breaks its fork, it is refused, and
the router is not affected.
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

CPU_SECONDS = 0.25  # of one check; of 1,232 schemas written by people, the slowest takes 0.04
MEMORY_BYTES = 256 << 20  # of one check, in addition to what the process has
NICENESS = 10  # running requests come first
NUM_KNOWN = 256  # grammars whose result is remembered


class GrammarChecks:
    """Ask the process about one grammar at a time. Usable from any event loop; starts the process on first use."""

    def __init__(self) -> None:
        # By digest, as a grammar may have a million characters: the reason for refusal, or ""; last used last.
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar-checks")

    def __len__(self) -> int:
        """Return the number of grammars whose result is remembered: at most NUM_KNOWN."""
        return len(self._known)

    async def check(self, grammar: str) -> None:
        """Raise InvalidRequestError for a grammar that cannot be used or takes too much to compile."""
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
            self._end()  # the next check starts another process
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
    """Fork, check the grammar in the child, and return why it is refused; empty: it is not."""
    reads, writes = os.pipe()
    copy = os.fork()
    if copy == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # discards llguidance's output when it aborts
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
    """Answer each grammar from standard input on standard output, until the router closes the input."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is meant for the router
    _refusal("regex:ready")  # loads what every fork needs
    while True:
        try:
            grammar = _receive(0).decode()
        except EOFError:
            return
        _send(1, _check_in_copy(grammar).encode())


if __name__ == "__main__":
    main()
