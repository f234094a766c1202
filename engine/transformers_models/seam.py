"""Where transformers' models attend: one function behind their attention interface, which asks the module it is for.

transformers dispatches by a name in the model's config. The function registered under `NAME` knows neither a model
nor a step: `connect` has put on each module what attends there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError, UnsupportedModelError

NAME = "mini_infer"
INSTALL = "pip install 'mini-infer[transformers]'"
HARMLESS = ("position_ids", "sliding_window", "softcap", "s_aux")  # tensors and numbers that are read, or not needed


@dataclass(frozen=True, slots=True)
class Call:
    """What a module asks of attention.

    q: (1, heads, n, k_dim); k: (1, kv_heads, n, k_dim); v: (1, kv_heads, n, v_dim), of n tokens of any sequences.
    """

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """How a layer attends. name: of its module. window: keys that a query sees, itself included; 0: all."""

    name: str
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False


Attends = Callable[[Call], Tensor]
"""Returns (1, n, heads, v_dim)."""


def require_transformers(asked_by: str) -> Any:
    """Import transformers, which takes seconds. Raises ConfigError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"{asked_by} needs the package transformers: {INSTALL}") from error
    transformers.AttentionInterface.register(NAME, attention)
    return transformers


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, dropout: float = 0.0, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls, see `AttentionInterface` there."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attends: Attends = module.__dict__[NAME]
    return attends(Call(module, query, key, value, attention_mask, scale, options)), None


def connect(module: nn.Module, attends: Attends) -> None:
    """Let `attends` answer the module's calls."""
    module.__dict__[NAME] = attends


def check_call(call: Call) -> None:
    """Raise UnsupportedModelError for what our attention would leave out; some ask for it of long sequences alone."""
    if call.mask is not None:
        raise UnsupportedModelError("its attention takes a mask of its own")
    for key, value in call.options.items():
        if isinstance(value, Tensor) and key not in HARMLESS:
            raise UnsupportedModelError(f"its attention takes {key}, which ours does not know")


def layer_of(name: str, call: Call) -> Layer:
    """How the module attends that calls. Raises UnsupportedModelError for what our attention does not do."""
    check_call(call)
    options = call.options
    is_causal = options.get("is_causal")
    if not (getattr(call.module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModelError("its attention sees later tokens")
    (_, num_heads, _, k_dim), (_, num_kv_heads, _, v_dim) = call.q.shape, call.v.shape
    return Layer(
        name, num_heads, num_kv_heads, k_dim, v_dim, call.scale,
        window=options.get("sliding_window") or 0,
        softcap=options.get("softcap") or 0.0,
        has_sinks=options.get("s_aux") is not None,
    )  # fmt: skip


def record(model: nn.Module, calls: list[Layer]) -> None:
    """Let every module that attends leave its layer in `calls`, and compute nothing."""
    for name, module in model.named_modules():

        def attends(call: Call, name: str = name) -> Tensor:
            calls.append(layer_of(name, call))
            shape = call.q.shape[0], call.q.shape[2], call.q.shape[1], call.v.shape[3]
            return torch.empty(shape, dtype=call.q.dtype, device=call.q.device)

        connect(module, attends)
