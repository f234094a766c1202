"""Fetch a model's files from the hub, with progress, through huggingface_hub."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from common.errors import ConfigError

TOKENIZER_PATTERNS = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHT_PATTERNS = ["*.safetensors"]


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
