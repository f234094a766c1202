"""Layers whose products take rounded inputs (fp8, w8a8, int8-weight): norms and the gate round what they write.

    residual += previous output, normed, rounded     one kernel
    SiLU(gate) * up, rounded                         one kernel; with few rows the product gates, a small one rounds

The plain way would store each product's input and round it in a kernel of its own. Knows no graphs and no batches;
`FusedForward` asks `max_rows` once and hands over.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from engine.gpu.quantized import EightBitLinear
from engine.layers.decoder import DecoderLayer, DecoderModel
from engine.layers.linear import LinearMap
from kernels.gpu.rms_norm import add_rms_norm
from kernels.gpu.rounding import norm_codes

Attend = Callable[[int, Tensor], Tensor]
"""(layer, q, k and v (tokens, heads + 2 kv_heads, head_dim), not rotated) -> (tokens, heads * head_dim)"""


def max_rows(model: DecoderModel) -> int:
    """Tokens that `hidden` takes: 0 unless all layers round to one type before qkv, gate_up and down."""
    kinds = {type(linear) for layer in model.layers for linear in (layer.qkv, layer.gate_up, layer.down)}
    kind = kinds.pop()
    return kind.max_rounded if not kinds and issubclass(kind, EightBitLinear) else 0


def hidden(model: DecoderModel, token_ids: Tensor, attend: Attend) -> Tensor:
    """Hidden states (tokens, hidden) after the final norm, of up to `max_rows`."""
    eps, head_dim = model.config.rms_norm_eps, model.config.head_dim
    residual = functional.embedding(token_ids, model.embedding)
    added = None
    for index, layer in enumerate(model.layers):
        qkv, gate_up, down = maps_of(layer)
        codes = norm_codes(added, residual, layer.attention_norm, eps, qkv.dtype, qkv.digits)
        heads = qkv.of_codes(*codes, residual.dtype).view(residual.shape[0], -1, head_dim)
        attended = layer.attention_output(attend(index, heads))
        codes = norm_codes(attended, residual, layer.mlp_norm, eps, qkv.dtype, qkv.digits)
        added = down.of_codes(*gate_up.gated_codes(*codes, residual.dtype), residual.dtype)
    assert added is not None
    return add_rms_norm(added, residual, model.final_norm, eps)


def maps_of(layer: DecoderLayer) -> tuple[EightBitLinear, EightBitLinear, EightBitLinear]:
    """qkv, gate_up and down."""
    return _rounded(layer.qkv), _rounded(layer.gate_up), _rounded(layer.down)


def _rounded(linear: LinearMap) -> EightBitLinear:
    assert isinstance(linear, EightBitLinear)
    return linear
