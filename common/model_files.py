"""Resolves `--model`: a directory with safetensors, a .gguf file, a hub id (`org/name`, for GGUF files
`org/name:Q4_K_M`), or nothing for the default.

Returns where the files are; opens them only for a digest.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import ConfigError
from common.wings import has_wing, require_wing

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DRY_RUN_MODEL_NAME = "dry-run"
NUM_SAMPLES = 256
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files. kind: what `path` is: a directory, a GGUF file (or a part of one), or (dry-run) nothing."""

    name: str  # the name for clients, unless the model is served under another one
    kind: Literal["directory", "gguf", "dry-run"]
    path: Path


def resolve_model(model: str, weights: bool = True) -> ModelFiles:
    """Find the files of `model`. Raises ConfigError, which says what to do, when there are none.

    weights: False downloads only configuration and tokenizer of a hub id, which is enough for a router.
    """
    if model in ("", "default", DEFAULT_MODEL_NAME):
        require_wing("common.gguf", f"the default model, {DEFAULT_MODEL_NAME},")
        from common.gguf.default_model import default_file

        return ModelFiles(DEFAULT_MODEL_NAME, "gguf", default_file())
    if model == DRY_RUN_MODEL_NAME:
        return ModelFiles(DRY_RUN_MODEL_NAME, "dry-run", Path())
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path.name} is not a .gguf file; give a GGUF file or a directory with safetensors")
        return _gguf_files(re.sub(r"-\d{5}-of-\d{5}$", "", path.stem), path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            gguf = next(iter(sorted(path.glob("*.gguf"))), None)
            instead = f"name the file, {gguf}" if gguf else "give one with config.json and *.safetensors"
            raise ConfigError(f"directory {model} has no config.json: {instead}")
        return ModelFiles(path.resolve().name, "directory", path)
    can_download = has_wing("common.download")
    if can_download and model.count("/") == 1 and not model.startswith((".", "/", "~")):
        from common.download.hub import download, download_gguf

        hub_id, colon, quantization = model.partition(":")
        if colon:
            return _gguf_files(model, download_gguf(hub_id, quantization, weights))
        return ModelFiles(model, "directory", download(model, weights=weights))
    or_hub_id = " or a hub id" if can_download else ""
    raise ConfigError(f"model {model!r} not found: give a directory with safetensors, a .gguf file{or_hub_id}")


def _gguf_files(name: str, path: Path) -> ModelFiles:
    require_wing("common.gguf", path.name)
    return ModelFiles(name, "gguf", path)


def sampled_digest(path: Path) -> bytes:
    """Compute SHA-256 over the file's size, its first MiB (with the header) and samples spread over the rest."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        if size > 1 << 20:
            for index in range(NUM_SAMPLES):
                file.seek((size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
