"""`python -m decode_service`: settings from flags and MINI_INFER_* variables, then serve until SIGTERM."""

import sys

from decode_service.server import register
from engine.worker.service import run_worker


def main() -> int:
    return run_worker("decode", register)


if __name__ == "__main__":
    sys.exit(main())
