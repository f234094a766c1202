"""Downloads a model's files from the hub, with progress, through huggingface_hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from common.download.parts import fetch_parts
from common.errors import ConfigError

TOKENIZER_PATTERNS = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHT_PATTERNS = ["*.safetensors"]
# Copies of the weights in the formats of Mistral's and OpenAI's own programs.
IGNORED_PATTERNS = ["consolidated*.safetensors", "original/*", "metal/*"]
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTIZATION = re.compile(r"(?:^|[-._/])((?:UD-)?I?Q\d\w*|MXFP4\w*|BF16|F16|F32)$", re.IGNORECASE)
_NUM_NAMED = 12  # quantizations named in an error


def download(hub_id: str, folder: Path | None = None, weights: bool = True) -> Path:
    """Download a model's files into `folder` or the hub's cache; return their folder. Raises ConfigError.

    Resumes an interrupted download. One into `folder` is complete when this returns.
    """
    from huggingface_hub import snapshot_download

    patterns = TOKENIZER_PATTERNS + WEIGHT_PATTERNS * weights
    chosen: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": IGNORED_PATTERNS}
    with _told(hub_id, folder):
        found = _snapshot(hub_id, folder, chosen)
        if folder is not None:  # if the hub is unreachable, the call above accepts the files that exist
            files = snapshot_download(hub_id, local_dir=folder, dry_run=True, **chosen)
            left = [file.filename for file in files if file.will_download]
            if left:
                raise ConfigError(f"the download of {hub_id} is not complete: {', '.join(left)}")
        if not (found / "config.json").is_file() and (names := _gguf_names(hub_id)):
            known = ", ".join(f"{hub_id}:{each}" for each in quantizations(names)[:_NUM_NAMED])
            raise ConfigError(f"{hub_id} has GGUF files and no config.json: name one, as in {known}")
    return found


def download_gguf(hub_id: str, quantization: str, weights: bool = True) -> Path:
    """Download the GGUF file that `quantization` names, or its parts, into the hub's cache; return the first.

    weights: false fetches only the first part, which has configuration and tokenizer. Raises ConfigError.
    """
    with _told(hub_id, None):
        files = gguf_files(hub_id, _gguf_names(hub_id), quantization)
        wanted = files if weights else files[:1]
        return _snapshot(hub_id, None, {"allow_patterns": wanted}) / files[0]


def gguf_files(hub_id: str, names: Sequence[str], quantization: str) -> list[str]:
    """Return the file among a repository's files that `quantization` (`Q4_K_M`, any case) names, or its parts in
    order.

    Raises ConfigError, which lists the quantizations that exist.
    """
    wanted = re.compile(rf"(?:^|[-._/]){re.escape(quantization)}$", re.IGNORECASE)
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if wanted.search(stem := _stem(name)):
            found.setdefault(stem, []).append(name)
    if not found:
        known = ", ".join(quantizations(names)[:_NUM_NAMED]) or "none"
        raise ConfigError(f"{hub_id} has no GGUF file named {quantization}; it has {known}")
    return found[min(found, key=len)]  # Q4_K_M, not UD-Q4_K_M


def quantizations(names: Sequence[str]) -> list[str]:
    """Return the sorted quantization names of GGUF files."""
    found = (_QUANTIZATION.search(_stem(name)) for name in names)
    return sorted({each[1] for each in found if each})


def _snapshot(hub_id: str, folder: Path | None, chosen: Mapping[str, list[str]]) -> Path:
    """Download the chosen files. chosen: patterns for `snapshot_download`."""
    from huggingface_hub import snapshot_download

    patterns: dict[str, Any] = {**chosen}
    try:
        files = snapshot_download(hub_id, local_dir=folder, dry_run=True, **patterns)
    except _client_errors():  # the hub is unreachable: files that exist may be enough
        files = []
    fetch_parts(hub_id, files, folder)
    return Path(snapshot_download(hub_id, local_dir=folder, **patterns))


def _client_errors() -> tuple[type[Exception], ...]:
    """Return OSError and the base of the HTTP client's errors, which differs between major versions."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)


def _stem(name: str) -> str:
    return _PART.sub("", name.removesuffix(".gguf"))


def _gguf_names(hub_id: str) -> list[str]:
    """Return the repository's GGUF files with weights of a language model."""
    from huggingface_hub import snapshot_download

    files = snapshot_download(hub_id, allow_patterns=["*.gguf"], ignore_patterns=["*mmproj*"], dry_run=True)
    return [file.filename for file in files]


@contextmanager
def _told(hub_id: str, folder: Path | None) -> Iterator[None]:
    """Convert errors that keep a user from files of the hub into ConfigErrors that say what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        yield
    except HFValidationError:
        raise ConfigError(f"{hub_id} is no hub id: one is organization/name") from None
    except RepositoryNotFoundError as error:  # a gated repository, too
        raise ConfigError(
            f"{hub_id} is not on the hub, or not for everybody: check the id, and set HF_TOKEN if it is gated or "
            "private"
        ) from error
    except _client_errors() as error:
        if isinstance(error, OSError) and error.errno is not None:  # about this machine's files, not the hub
            raise ConfigError(
                f"cannot keep {hub_id} in {folder or constants.HF_HUB_CACHE}: {error.strerror}. Mount a volume "
                "there, or set HF_HOME to a folder that may be written to"
            ) from error
        raise ConfigError(
            f"cannot download {hub_id} ({type(error).__name__}): check the network (HF_ENDPOINT names a mirror), or "
            "download it elsewhere and give the directory with --model"
        ) from error
