"""Wait for files made by others: `python -m common.wait_for PATH --hint TEXT` exits with 0 once PATH is there.

Used by init containers. A socket counts once it accepts connections; any other path when it exists. After `--seconds`
it exits with 1 and says what is missing; the hint says who makes it.
"""

from __future__ import annotations

import argparse
import signal
import socket
import stat
import sys
import time
from pathlib import Path

from common.process import exit_on_sigterm

INTERVAL_SECONDS = 0.5
CONNECT_SECONDS = 2.0


def missing(path: Path) -> str | None:
    """Return why `path` does not count as being there; None: it does."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"{path}: {(error.strerror or type(error).__name__).lower()}"
    if not stat.S_ISSOCK(mode):
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_SECONDS)
        try:
            probe.connect(str(path))
        except OSError as error:
            return f"{path}: nobody accepts connections ({(error.strerror or type(error).__name__).lower()})"
    return None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wait_for", description="Exit with 0 as soon as PATH is there.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="give up after this long (default: 120)")
    parser.add_argument("--hint", default="", help="who makes it, for the message when it is missing")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 if the path is there, 1 if it was not in time."""
    arguments = build_parser().parse_args(argv)
    deadline = time.monotonic() + arguments.seconds
    reason = missing(arguments.path)
    if reason:
        print(f"waiting up to {arguments.seconds:.0f} s for {reason}", file=sys.stderr, flush=True)
    while reason and time.monotonic() < deadline:
        time.sleep(INTERVAL_SECONDS)
        reason = missing(arguments.path)
    if reason:
        print(f"gave up after {arguments.seconds:.0f} s: {reason}. {arguments.hint}".rstrip(), file=sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    exit_on_sigterm(128 + signal.SIGTERM)  # otherwise a pod that is deleted would wait for its whole grace period
    sys.exit(main())
