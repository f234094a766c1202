"""A private directory for one cluster's Unix sockets, gone when the cluster is, however it ends.

A shell that waits for the end of a pipe removes it: the pipe ends when we close it, and also when we are
killed, so that not even SIGKILL leaves the directory behind.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

_REMOVE_AT_END_OF_PIPE = 'read -r _; rm -rf -- "$1"'


class RunDirectory:
    """Context manager; `path` has mode 0700."""

    def __init__(self) -> None:
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        base = runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir()
        self.path = Path(tempfile.mkdtemp(prefix="mini-infer-", dir=base))
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE_AT_END_OF_PIPE, "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath)},  # our own environment may hold an API key
            start_new_session=True,  # Ctrl-C must not end it before us
        )

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._remover.stdin is not None
        self._remover.stdin.close()
        self._remover.wait()
