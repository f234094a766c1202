"""Allowed imports: pure modules load only the standard library, and no module loads torch."""

import subprocess
import sys

import pytest

PROBE = "import sys, importlib; [importlib.import_module(name) for name in sys.argv[1:]]; print(*sys.modules)"
PURE = [
    "pool.block_hash", "pool.block_pool", "pool.index", "pool.leases", "layout",
    "types",
]  # fmt: skip
with_tier = pytest.mark.wing("kvstore.tier")


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (PURE, {"numpy", "google", "grpc", "msgspec", "torch"}),
        pytest.param(["tier.host_tier"], {"numpy", "google", "grpc", "msgspec", "torch"}, marks=with_tier),
        (["transports.client", "transports.kv_transfer"], {"torch", "engine"}),
        pytest.param(["tier.agent", "tier.agent_client", "tier.settings"], {"torch", "engine"}, marks=with_tier),
    ],
)
def test_imports_stay_small(modules: list[str], forbidden: set[str]) -> None:
    command = [sys.executable, "-c", PROBE, *(f"kvstore.{module}" for module in modules)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert "kvstore" in loaded
    assert not loaded & forbidden
