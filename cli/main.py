"""`mini-infer COMMAND`: runs the command and turns its errors into one line and an exit code.

Knows commands only by name: it imports the module of a command to run it, so that `--help` is instant.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from common import VERSION
from common.errors import MiniInferError
from common.wings import require_wing

# name -> (module with `run(argv) -> exit code`, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("cli.cluster.serve", "start a whole cluster on this machine"),
    "chat": ("cli.terminal.chat", "talk to a model in the terminal"),
    "top": ("cli.top.top", "the cluster and its requests, each second"),
    "explain": ("cli.top.explain", "where the time of a request went"),
    "demo": ("cli.load.demo", "a short tour: streaming, batching, prefix cache, cancellation"),
    "bench": ("cli.load.bench", "load an OpenAI-compatible server and measure it"),
    "simulate": ("cli.simulation.simulate", "what a cluster would do with a load, in simulated time"),
    "plan": ("cli.simulation.plan", "how to divide GPUs between prompts and answers, in simulated time"),
}


def usage() -> str:
    """Return the help text of the program itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    more = "mini-infer COMMAND --help tells more; --version tells the version."
    return "usage: mini-infer COMMAND [options]\n\n" + "\n".join(lines) + f"\n\n{more}"


def run_command(name: str, argv: Sequence[str]) -> int:
    """Run one command and return its exit code. A MiniInferError becomes one line on stderr."""
    try:
        require_wing(COMMANDS[name][0], f"mini-infer {name}")
        result: int = importlib.import_module(COMMANDS[name][0]).run(list(argv))
        return result
    except MiniInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `mini-infer bench | head`: the reader has left
        sys.stderr.close()
        return 141


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `mini-infer`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"mini-infer {VERSION}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"error: no command {arguments[0]!r}: choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return run_command(arguments[0], arguments[1:])


def serve() -> int:
    """Entry point of `mini-infer-serve`."""
    return run_command("serve", sys.argv[1:])


def chat() -> int:
    """Entry point of `mini-infer-chat`."""
    return run_command("chat", sys.argv[1:])


def demo() -> int:
    """Entry point of `mini-infer-demo`."""
    return run_command("demo", sys.argv[1:])
