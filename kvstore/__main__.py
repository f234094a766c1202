"""`python -m kvstore`: the node agent. Settings from flags and MINI_INFER_* variables; serves until SIGTERM."""

import sys

from common.errors import ConfigError
from common.startup import exit_on_sigterm
from common.wings import require_wing


def main() -> int:
    exit_on_sigterm()
    try:
        require_wing("kvstore.tier", "the node agent")
    except ConfigError as error:
        sys.exit(f"kvstore: {error}")
    from kvstore.tier.agent_server import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
