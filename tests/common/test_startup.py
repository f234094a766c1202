"""A service that is stopped before it has imported everything."""

import subprocess
import sys

import pytest

CHILD = """
import builtins, os, runpy, signal, sys
plain = builtins.__import__

def stop_at(name, *arguments, **options):
    if name.split(".")[0] in ("torch", "grpc", "uvicorn"):  # the first import that takes time
        os.kill(os.getpid(), signal.SIGTERM)
    return plain(name, *arguments, **options)

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as for the first process of a container
builtins.__import__ = stop_at
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize(
    "service",
    ["router", "prefill_service", "decode_service", pytest.param("kvstore", marks=pytest.mark.wing("kvstore.tier"))],
)
def test_sigterm_while_a_service_is_imported_ends_it_well(service: str) -> None:
    command = [sys.executable, "-c", CHILD, service, "--model", "dry-run"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert process.returncode == 0, process.stderr
    assert not process.stdout
