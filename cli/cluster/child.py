"""Run a service as a child of `serve` that can't outlive it: `python -m cli.cluster.child PID MODULE ARGS...`.

The kernel kills this process when its parent, PID, ends in any way, SIGKILL included. It knows nothing of the
module that it runs. (A `preexec_fn` could set the same bit, but is unsafe in a process with threads.)
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends; exit now if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended between starting us and the call above
        sys.exit(1)


def child_command(module: str, argv: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the command line that runs `module` as a child of this process."""
    return (sys.executable, "-m", "cli.cluster.child", str(os.getpid()), module, *argv)


def child_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Extend `env` so that a child and its own children find our packages from any working directory.

    PYTHONSAFEPATH: our packages have short names, and the user may have a `common` or `engine` in that directory.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH", "")])])
    return {**env, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    _module = sys.argv[2]
    sys.argv = [_module, *sys.argv[3:]]
    runpy.run_module(_module, run_name="__main__", alter_sys=True)
