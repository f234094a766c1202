"""`python -m prefill_service`: reads settings from flags and MINI_INFER_* variables, and serves until SIGTERM."""

import sys

from common.process import exit_on_sigterm


def main() -> int:
    exit_on_sigterm()
    from worker.service import run_worker

    return run_worker("prefill")


if __name__ == "__main__":
    sys.exit(main())
