"""Downloads large files of a model into parts that survive an interruption; huggingface_hub deletes its own.

A complete part is renamed to the file that huggingface_hub looks for, and is not downloaded again.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

MIN_BYTES = 8 << 20  # of a file: fetching a smaller one again is faster than asking for its metadata
NUM_AT_ONCE = 4
_SHA256 = re.compile("[0-9a-f]{64}")


class _StoppedError(Exception):
    """Another file failed, or the user pressed Ctrl-C."""


class _Part:
    """A file whose `write` raises once it is told to stop: nothing else ends a downloading thread."""

    def __init__(self, file: BinaryIO, stop: threading.Event) -> None:
        self._file = file
        self._stop = stop
        self.tell, self.seek, self.truncate = file.tell, file.seek, file.truncate

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        if self._stop.is_set():
            raise _StoppedError
        return written


class _Place(NamedTuple):
    """Where a file is downloaded to."""

    part: Path
    target: Path
    lock: Path


def fetch_parts(hub_id: str, files: Sequence[DryRunFileInfo], folder: Path | None) -> None:
    """Fetch the large missing files among `files` into `folder` or the hub's cache.

    Leaves to huggingface_hub the files that only it can fetch, and all files if its switch for fast networks is set.
    Raises huggingface_hub's errors.
    """
    from huggingface_hub import constants

    if os.environ.get("HF_XET_HIGH_PERFORMANCE"):
        return
    most = constants.MAX_HTTP_DOWNLOAD_SIZE
    wanted = [file for file in files if file.will_download and MIN_BYTES <= (file.file_size or 0) <= most]
    stop = threading.Event()
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        fetching = [pool.submit(_fetch, hub_id, file, folder, stop) for file in wanted]
        try:
            for each in as_completed(fetching):
                each.result()
        except BaseException:  # Ctrl-C, too: the pool waits for its threads, which download until told to stop
            stop.set()
            for each in fetching:
                each.cancel()
            raise


def _fetch(hub_id: str, file: DryRunFileInfo, folder: Path | None, stop: threading.Event) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]  # no __all__

    url, headers = hf_hub_url(hub_id, file.filename, revision=file.commit_hash), build_hf_headers()
    found = get_hf_file_metadata(url, headers=headers)
    if found.etag is None or found.size is None or not _SHA256.fullmatch(found.etag):
        return
    part, target, lock = place = _place(hub_id, file.filename, found.etag, folder)
    for path in place:
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if target.exists():
            return
        num_before = part.stat().st_size if part.exists() else 0
        if num_before > found.size:
            part.unlink()
            num_before = 0
        with part.open("ab") as opened:
            growing: Any = _Part(opened, stop)
            http_get(
                url, growing, resume_size=num_before, headers=headers, expected_size=found.size,
                displayed_filename=file.filename,
            )  # fmt: skip
        if num_before and _sha256(part) != found.etag:  # written by several processes, where locks do not work
            part.unlink()
            return
        part.replace(target)


def _place(hub_id: str, name: str, etag: str, folder: Path | None) -> _Place:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if folder is not None:
        parts = folder / ".cache" / "parts"
        return _Place(parts / etag, folder / name, parts / f"{etag}.lock")
    cache, repository = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=hub_id, repo_type="model")
    blob = cache / repository / "blobs" / etag
    return _Place(cache / repository / "parts" / etag, blob, cache / ".locks" / repository / f"{etag}.lock")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
