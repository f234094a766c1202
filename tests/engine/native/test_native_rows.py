"""Norm, rotation and gate in C equal what torch computes, in every variant that this CPU runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.expert_gate import SILU
from kernels.native import rows
from tests.engine.native.native import native_variant, needs_library  # noqa: F401 - a fixture

pytestmark = [needs_library, pytest.mark.usefixtures("native_variant")]
DTYPES = [torch.float32, torch.bfloat16]


def assert_close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, units: int = 2) -> None:
    """Check that errors are within a number of units in the last place of `dtype`."""
    torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=units * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)  # of the result
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("n", [8, 200, 6000])
def test_norms(dtype: torch.dtype, scale: float, n: int) -> None:
    """Also for rows whose mean is far from zero, and with single entries far above the rest."""
    torch.manual_seed(0)
    residual = (torch.randn(7, n) + torch.arange(7.0)[:, None]) * scale
    residual[3, 7] = 200 * scale
    weight = (1 + torch.randn(n) / 5).to(dtype)
    add_norm = rows.add_rms_norm(weight, 1e-5, dtype)
    assert add_norm is not None
    for x in (None, torch.randn(7, n), torch.randn(7, n).bfloat16(), torch.randn(n, 7).half().T):
        wide = residual.double() if x is None else residual.double() + x.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        found = add_norm(residual, x)
        assert found.dtype == dtype
        assert_close(found, exact, dtype)
        assert_close(residual, wide, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 24, 64, 128])
def test_rotation(dtype: torch.dtype, head_dim: int) -> None:
    """For heads that are a slice of a larger tensor, and for a part of each head."""
    torch.manual_seed(0)
    x = torch.randn(9, 6, head_dim + 3).to(dtype)
    kept = x.clone()
    table = torch.randn(40, 2, head_dim)[torch.randint(40, (9,))]
    cos, sin = table[:, :1], table[:, 1:]
    assert rows.rotate(x[:, 1:5, 3:], cos, sin)
    wide = kept[:, 1:5, 3:].double()
    exact = wide * cos + wide.roll(head_dim // 2, dims=-1) * sin
    assert_close(x[:, 1:5, 3:], exact, dtype, units=4)
    kept[:, 1:5, 3:] = x[:, 1:5, 3:]
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (3, 80), (70, 1536)])
def test_gates(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(shape[0], 2 * shape[1]) * 30).to(dtype)  # far enough for sigmoids of 0 and of 1
    found = rows.silu_mul(gate_up, *SILU)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert found is not None
    assert_close(found, functional.silu(gate) * up, dtype)
    clamped = rows.silu_mul(gate_up, 1.702, 7.0)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    assert clamped is not None
    assert_close(clamped, gate * torch.sigmoid(1.702 * gate) * (up + 1), dtype)


def test_a_row_has_the_same_bits_among_any_others() -> None:
    """Alone on one thread, and among enough others for several threads."""
    torch.manual_seed(0)
    gate_up, residual = torch.randn(90, 1536).bfloat16(), torch.randn(90, 768)
    table = torch.randn(90, 2, 64)
    add_norm = rows.add_rms_norm(torch.ones(768), 1e-5, torch.bfloat16)
    assert add_norm is not None

    def computed(which: slice) -> list[torch.Tensor]:
        heads = gate_up[which].clone().view(-1, 24, 64)
        assert rows.rotate(heads, table[which, :1], table[which, 1:])
        gated = rows.silu_mul(gate_up[which], *SILU)
        assert gated is not None
        return [add_norm(residual[which].clone(), gate_up[which, :768]), heads, gated]

    together = computed(slice(0, 90))
    for which in (slice(0, 1), slice(40, 43)):
        for found, expected in zip(computed(which), together, strict=True):
            assert torch.equal(found, expected[which])


def test_what_it_does_not_take() -> None:
    x, table = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    assert rows.add_rms_norm(torch.ones(8), 1e-5, torch.float16) is None
    assert rows.silu_mul(x[0].half(), *SILU) is None
    assert rows.silu_mul(torch.randn(8, 4).T, *SILU) is None
    assert not rows.rotate(x.half(), table[:, :1], table[:, 1:])
    assert not rows.rotate(x, table[:, :1].double(), table[:, 1:].double())
