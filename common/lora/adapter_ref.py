"""References to adapters between services: a digest of the files and their folder.

The router creates a reference, and a request carries it as its `adapter`: through the journal, `Submit` and the
engine's `Request` into the block keys. A worker needs nothing else to load the adapter, and notices changed files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError
from common.lora.adapter_config import CONFIG_NAME
from common.model_files import sampled_digest

WEIGHTS_NAME = "adapter_model.safetensors"
DIGEST_CHARS = 32


class AdapterRef(NamedTuple):
    """digest: of the folder's files when the reference was created."""

    digest: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.digest}:{self.folder}"

    @classmethod
    def of(cls, folder: Path) -> AdapterRef:
        """Create a reference to the adapter in a folder. Raises ConfigError if a file is missing."""
        digest = hashlib.sha256()
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            try:
                digest.update(sampled_digest(folder / name))
            except OSError as error:
                raise ConfigError(f"{folder} has no {name} that can be read ({error.strerror})") from None
        return cls(digest.hexdigest()[:DIGEST_CHARS], folder)

    @classmethod
    def parse(cls, text: str) -> AdapterRef:
        """Parse the result of `str`. Raises ConfigError."""
        digest, colon, folder = text.partition(":")
        if not colon or len(digest) != DIGEST_CHARS or not folder.startswith("/"):
            raise ConfigError(f"{text[:200]!r} does not refer to an adapter")
        return cls(digest, Path(folder))

    def check(self) -> None:
        """Raise ConfigError if the folder's files have changed."""
        if AdapterRef.of(self.folder).digest != self.digest:
            raise ConfigError(f"the adapter in {self.folder} has changed since it was loaded: load it again")
