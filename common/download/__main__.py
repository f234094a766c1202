"""Download a model from the hub into a folder: `python -m common.download HUB_ID FOLDER`.

Files arrive in FOLDER.partial. An interrupted download is resumed, even within a large file. FOLDER appears only when
all files are complete, so that it can be used as soon as it exists. HF_TOKEN and HF_ENDPOINT are variables of
huggingface_hub.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from common.download.hub import download
from common.errors import ConfigError


def download_into(hub_id: str, folder: Path) -> None:
    """Create `folder` with the files of `hub_id`, unless it exists. Raises ConfigError."""
    if folder.exists():
        print(f"{folder} is there", flush=True)
        return
    partial = folder.with_name(folder.name + ".partial")
    print(f"downloading {hub_id} into {partial}", flush=True)
    download(hub_id, partial)
    if not (partial / "config.json").is_file():
        raise ConfigError(f"{hub_id} has no config.json: it is no model in Hugging Face's format")
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the hub's records of complete files
    partial.rename(folder)
    print(f"{folder} is complete", flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="download", description="Download a model from the hub into a folder.")
    parser.add_argument("hub_id", help="organization/name")
    parser.add_argument("folder", type=Path, help="what workers take as --model")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 when the folder is complete, otherwise 1, 130 after Ctrl-C; a further run resumes."""
    arguments = build_parser().parse_args(argv)
    try:
        download_into(arguments.hub_id, arguments.folder)
    except ConfigError as error:
        print(f"download: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("download: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # Exit immediately, as SIGKILL would after the grace period: sys.exit would wait for the downloading threads.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    sys.exit(main())
