"""AutoRound: weights in GPTQ's or AWQ's layout, with its own config, which may override layers.

packing_format (earlier `backend`) is auto_round:auto_gptq, with zero points stored minus one, or auto_round:auto_awq.
extra_config: overrides by layer name; 16 bits mean plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError
from engine.quantization.formats import awq, gptq
from engine.quantization.formats.scheme import CheckpointQuantization, NotSupportedError

PLAIN_BITS = 16


def parse(config: Mapping[str, Any]) -> CheckpointQuantization:
    packing = str(config.get("packing_format") or config.get("backend"))
    parse_layout = next(
        (parse for name, parse in (("gptq", gptq.parse), ("awq", awq.parse)) if name in packing), None
    )
    if parse_layout is None or config.get("data_type", "int") != "int":
        raise NotSupportedError(f"AutoRound's {config.get('data_type', 'int')} in the packing {packing!r}")
    overrides = config.get("extra_config") or {}
    if not isinstance(overrides, Mapping):
        raise ConfigError("config.json: quantization_config.extra_config is not an object")
    wanted = [config]
    for change in overrides.values():
        if isinstance(change, Mapping) and change.get("bits", config.get("bits")) != PLAIN_BITS:
            wanted.append({**config, **change})
    names = ("bits", "group_size")
    made = [parse_layout({name: each[name] for name in names if name in each}) for each in wanted]
    schemes = dict.fromkeys(scheme for each in made for scheme in each.schemes)
    return CheckpointQuantization(f"auto-round-{config.get('bits')}bit", tuple(schemes))
