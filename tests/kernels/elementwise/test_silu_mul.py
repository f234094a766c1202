from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.elementwise import silu_mul
from kernels.gpu.elementwise import silu_mul as gpu
from tests.kernels.helpers import BFLOAT16_BOUND, relative_error


@pytest.mark.parametrize(("rows", "n"), [(1, 16), (3, 1536), (2, 1031), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(rows, 2 * n, device=device, dtype=dtype) * 4
    out = gpu.silu_mul(gate_up)
    assert out.shape == (rows, n)
    if rows:
        bound = 1e-6 if dtype == torch.float32 else BFLOAT16_BOUND
        assert relative_error(out, silu_mul(gate_up)) < bound


def test_large_negative_gates_give_zero_not_nan(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert gpu.silu_mul(gate_up).tolist() == [[0.0, 0.0, 200.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_by_the_tanh_approximation(dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(3, 62, device=device, dtype=dtype) * 4
    gate_up[0, :3], gate_up[0, 31:34] = torch.tensor([-1e4, 1e4, 0.0]), 1.0
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = gpu.silu_mul(gate_up, is_gelu=True)
    assert out[0, :3].tolist() == gate_up[0, :3].clamp(min=0).tolist()
    expected = functional.gelu(gate, approximate="tanh") * up
    assert relative_error(out[1:], expected[1:]) < (1e-6 if dtype == torch.float32 else BFLOAT16_BOUND)
