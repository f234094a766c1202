"""What a Hugging Face `config.json` says of windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import UnsupportedModelError


def windows_from_hf(raw: Mapping[str, Any], is_causal: bool) -> dict[str, Any]:
    """Fields of `ModelConfig`, of a model some of whose layers use the window that the config names."""
    kinds = raw.get("layer_types") or ()
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"layer_types of {', '.join(sorted(map(str, unknown)))} are not supported")
    window = int(raw["sliding_window"])
    if raw.get("use_bidirectional_attention"):  # of so many tokens, half before and half after
        window = window // 2 + 1
    else:
        window += not is_causal
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    return {"sliding_window": window, "full_layers": full}
