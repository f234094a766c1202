"""A private directory for one cluster's Unix sockets, gone when the cluster is, however it ends.

A shell that waits for the end of a pipe removes it: the pipe ends when we close it, and also when we are
killed, so that not even SIGKILL leaves the directory behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_REMOVE_AT_END_OF_PIPE = 'read -r _; rm -rf -- "$1"'


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """Make the directory, with mode 0700."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir()
    path = Path(tempfile.mkdtemp(prefix="mini-infer-", dir=base))
    with subprocess.Popen(  # at the end of the block its input is closed, and its end is waited for
        ["/bin/sh", "-c", _REMOVE_AT_END_OF_PIPE, "sh", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath)},  # our own environment may hold an API key
        start_new_session=True,  # Ctrl-C must not end it before us
    ):
        yield path
