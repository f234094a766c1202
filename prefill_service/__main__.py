"""`python -m prefill_service`: settings from flags and MINI_INFER_* variables, then serve until SIGTERM."""

import sys

from engine.worker.service import run_worker
from prefill_service.server import register


def main() -> int:
    return run_worker("prefill", register)


if __name__ == "__main__":
    sys.exit(main())
