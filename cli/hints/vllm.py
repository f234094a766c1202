"""Flags and modes of vLLM, and what to use instead."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from common.config import ENV_PREFIX
from common.errors import ConfigError
from engine.config import EngineConfig

QUANT_MODE_HELP = {
    "w8a16": "int8-weight",
    "int8": "int8-weight",
    "gptq": "auto, which keeps what a checkpoint has",
    "awq": "auto, which keeps what a checkpoint has",
    "fp16": "none, with --dtype float16",
}
INSTEAD_OF_VLLM = {
    "--data-parallel-size": "use --decode, the number of workers",
    "--quantization": "use --quant-mode",
    "--enforce-eager": "use --no-use-cuda-graph",
    "--max-cpu-loras": "use --max-loras, the adapters in memory",
    "--swap-space": "use --preemption swap and --host-tier-gb",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--trust-remote-code": "code of a checkpoint is never run",
}


def check_quant_mode(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Refuse modes of other programs with an error that names ours. Raises ConfigError."""
    known = next(f for f in dataclasses.fields(EngineConfig) if f.name == "quant_mode").metadata["choices"]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quant-mode", default=env.get(ENV_PREFIX + "QUANT_MODE", ""))
    mode = parser.parse_known_args(argv)[0].quant_mode
    if mode and mode not in known:
        instead = f"use {QUANT_MODE_HELP[mode]}" if mode in QUANT_MODE_HELP else f"choose one of {', '.join(known)}"
        raise ConfigError(f"--quant-mode {mode} is not available: {instead}")
