"""Download a model from the hub into a folder: `python -m common.download HUB_ID FOLDER`.

Files arrive in FOLDER.partial. An interrupted download goes on where it was, within a large file, too; FOLDER appears
when all of them are there, so that whoever finds it may start from it. HF_TOKEN and HF_ENDPOINT are huggingface_hub's
own variables.
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
    """Make `folder` with the files of `hub_id`, unless it is there. Raises ConfigError."""
    if folder.exists():
        print(f"{folder} is there", flush=True)
        return
    partial = folder.with_name(folder.name + ".partial")
    print(f"downloading {hub_id} into {partial}", flush=True)
    download(hub_id, partial)
    if not (partial / "config.json").is_file():
        raise ConfigError(f"{hub_id} has no config.json: it is no model in Hugging Face's format")
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the hub's notes on what was complete
    partial.rename(folder)
    print(f"{folder} is complete", flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="download", description="Download a model from the hub into a folder.")
    parser.add_argument("hub_id", help="organization/name")
    parser.add_argument("folder", type=Path, help="what workers take as --model")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 when the folder is complete, else 1, after Ctrl-C 130; a further run goes on."""
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
    # At once, as SIGKILL would at the end of the grace period: sys.exit would wait for the threads that download.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    sys.exit(main())
