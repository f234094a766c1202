"""`python -m router`: settings from flags and MINI_INFER_* variables, then serve until SIGTERM."""

import sys

from common.process import exit_on_sigterm


def main() -> int:
    exit_on_sigterm()
    from router.server import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
