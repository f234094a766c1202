"""The adapters in one folder: each subfolder is one, and its name is the model's.

Routers that watch the same folder serve the same adapters without further calls, also after a restart.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError
from common.lora.adapter_config import CONFIG_NAME, read_adapter_config
from common.lora.adapter_ref import WEIGHTS_NAME, AdapterRef

logger = logging.getLogger(__name__)
Stamp = tuple[str, tuple[tuple[int, int], ...]]  # resolved folder; modification time and size of each file


class _Seen(NamedTuple):
    """stamp: of the last scan. is_read: whether `ref` belongs to these files. ref: None: no complete files yet."""

    stamp: Stamp
    is_read: bool
    ref: AdapterRef | None


class AdapterFolder:
    """Scans a folder. Raises ConfigError if it does not exist."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"--lora-dir {folder} is not a folder")
        self._folder = folder
        self._seen: dict[str, _Seen] = {}
        self._is_first = True

    def scan(self) -> dict[str, AdapterRef]:
        """Return the adapters in the folder now, by name.

        Files that changed since the previous scan may be incomplete: they count once a scan finds them unchanged, and
        until then the adapter that they replace is returned. The first scan returns all. Raises OSError if the folder
        cannot be read.
        """
        found = {}
        for folder in sorted(self._folder.iterdir()):
            stamp = None if folder.name.startswith(".") else _stamp_of(folder)
            if stamp is not None:
                found[folder.name] = self._look(self._seen.get(folder.name), stamp)
        self._seen, self._is_first = found, False
        return {name: seen.ref for name, seen in found.items() if seen.ref is not None}

    def _look(self, before: _Seen | None, stamp: Stamp) -> _Seen:
        if before is None or before.stamp != stamp:
            ref = before.ref if before is not None else None
            return _Seen(stamp, True, _read(stamp)) if self._is_first else _Seen(stamp, False, ref)
        return before if before.is_read else _Seen(stamp, True, _read(stamp))


def _stamp_of(folder: Path) -> Stamp | None:
    try:
        real = folder.resolve()
        stats = [(real / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
    except (OSError, RuntimeError):  # not an adapter, not complete yet, or a loop of links
        return None
    return str(real), tuple((each.st_mtime_ns, each.st_size) for each in stats)


def _read(stamp: Stamp) -> AdapterRef | None:
    folder = Path(stamp[0])
    try:
        read_adapter_config(folder)
        return AdapterRef.of(folder)
    except ConfigError as error:
        logger.warning("%s is not served: %s", folder, error)
        return None
