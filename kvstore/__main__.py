"""`python -m kvstore`: the node agent. Reads flags and MINI_INFER_* variables, and serves until SIGTERM."""

import sys

from common.process import exit_on_sigterm


def main() -> int:
    exit_on_sigterm()
    from kvstore.tier.agent_server import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
