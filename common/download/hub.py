"""Fetch a model's files from the hub, with progress, through huggingface_hub."""

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
# The same weights once more, as Mistral and OpenAI have them for their own programs.
IGNORED_PATTERNS = ["consolidated*.safetensors", "original/*", "metal/*"]
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTIZATION = re.compile(r"(?:^|[-._/])((?:UD-)?I?Q\d\w*|MXFP4\w*|BF16|F16|F32)$", re.IGNORECASE)
_NUM_NAMED = 12  # quantizations, in an error


def download(hub_id: str, folder: Path | None = None, weights: bool = True) -> Path:
    """Download a model's files into `folder`, or the hub's cache; return where they lie. Raises ConfigError.

    A download goes on where an earlier one was interrupted. One into `folder` is complete when this returns.
    """
    from huggingface_hub import snapshot_download

    patterns = TOKENIZER_PATTERNS + WEIGHT_PATTERNS * weights
    chosen: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": IGNORED_PATTERNS}
    with _told(hub_id, folder):
        found = _snapshot(hub_id, folder, chosen)
        if folder is not None:  # for a hub out of reach, the call above takes the files that happen to be there
            files = snapshot_download(hub_id, local_dir=folder, dry_run=True, **chosen)
            left = [file.filename for file in files if file.will_download]
            if left:
                raise ConfigError(f"the download of {hub_id} is not complete: {', '.join(left)}")
        if not (found / "config.json").is_file() and (names := _gguf_names(hub_id)):
            known = ", ".join(f"{hub_id}:{each}" for each in quantizations(names)[:_NUM_NAMED])
            raise ConfigError(f"{hub_id} has GGUF files and no config.json: name one, as in {known}")
    return found


def download_gguf(hub_id: str, quantization: str, weights: bool = True) -> Path:
    """Download the GGUF file, or its parts, that `quantization` names into the hub's cache; return the first.

    weights: false fetches the first part alone, which has configuration and tokenizer. Raises ConfigError.
    """
    with _told(hub_id, None):
        files = gguf_files(hub_id, _gguf_names(hub_id), quantization)
        wanted = files if weights else files[:1]
        return _snapshot(hub_id, None, {"allow_patterns": wanted}) / files[0]


def gguf_files(hub_id: str, names: Sequence[str], quantization: str) -> list[str]:
    """The file, or its parts in order, that `quantization` (`Q4_K_M`, any case) names among a repository's files.

    Raises ConfigError, which lists what there is.
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
    """What GGUF files are called by, in order."""
    found = (_QUANTIZATION.search(_stem(name)) for name in names)
    return sorted({each[1] for each in found if each})


def _snapshot(hub_id: str, folder: Path | None, chosen: Mapping[str, list[str]]) -> Path:
    """Download the chosen files. chosen: patterns, as `snapshot_download` takes them."""
    from huggingface_hub import snapshot_download

    patterns: dict[str, Any] = {**chosen}
    try:
        files = snapshot_download(hub_id, local_dir=folder, dry_run=True, **patterns)
    except _client_errors():  # the hub is out of reach: what is there may be enough
        files = []
    fetch_parts(hub_id, files, folder)
    return Path(snapshot_download(hub_id, local_dir=folder, **patterns))


def _client_errors() -> tuple[type[Exception], ...]:
    """OSError, and the base of what the HTTP client raises, of which there is another one in each major version."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)


def _stem(name: str) -> str:
    return _PART.sub("", name.removesuffix(".gguf"))


def _gguf_names(hub_id: str) -> list[str]:
    """The repository's GGUF files with weights of a language model."""
    from huggingface_hub import snapshot_download

    files = snapshot_download(hub_id, allow_patterns=["*.gguf"], ignore_patterns=["*mmproj*"], dry_run=True)
    return [file.filename for file in files]


@contextmanager
def _told(hub_id: str, folder: Path | None) -> Iterator[None]:
    """Raise what keeps files of the hub from a user as ConfigError that says what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        yield
    except HFValidationError:
        raise ConfigError(f"{hub_id} is no hub id: one is organization/name") from None
    except RepositoryNotFoundError as error:  # a gated one, too
        raise ConfigError(
            f"{hub_id} is not on the hub, or not for everybody: check the id, and set HF_TOKEN if it is gated or "
            "private"
        ) from error
    except _client_errors() as error:
        if isinstance(error, OSError) and error.errno is not None:  # of this machine's files, not of the hub
            raise ConfigError(
                f"cannot keep {hub_id} in {folder or constants.HF_HUB_CACHE}: {error.strerror}. Mount a volume "
                "there, or set HF_HOME to a folder that may be written to"
            ) from error
        raise ConfigError(
            f"cannot download {hub_id} ({type(error).__name__}): check the network (HF_ENDPOINT names a mirror), or "
            "download it elsewhere and give the directory with --model"
        ) from error
