"""`mini-infer serve`: a whole cluster on this machine as child processes, from one command to Ctrl-C.

Checks what can be checked before anything starts, plans the cluster and hands it to the supervisor. Knows nothing of
HTTP, models or tokens; `flags` reads the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cli.cluster.flags import GROUPS, check_ports, parse_config
from cli.cluster.plan import ClusterConfig, plan_cluster, workers_of
from cli.cluster.progress import StartDisplay
from cli.cluster.supervisor import StartError, Supervisor, until_death
from common.logging import write_line
from common.model_files import DEFAULT_MODEL_NAME, resolve_model
from common.wings import call_wing, from_wing

FAILED_START_GRACE_SECONDS = 3.0
BETTER_MODEL = "Qwen/Qwen3-0.6B"  # better than the default model, for users who can reach the hub
_REMOVE_AT_END_OF_PIPE = 'read -r _; rm -rf -- "$1"'


def run(argv: Sequence[str]) -> int:
    """Run the command. Returns exit code 0 after Ctrl-C or SIGTERM; raises errors."""
    config = parse_config(argv, os.environ, from_wing("cli.gpus.placement:find_gpus"))
    check_ports(config)
    model = resolve_model(config.engine.model)
    placed: list[str] = call_wing("cli.gpus.workers:check_placement", config, model, argv) or []
    classes = [cls for _, cls in GROUPS]
    for line in call_wing("cli.hints.variables:misspelt_variables", os.environ, *classes) or ():
        print(f"note: {line}", file=sys.stderr)
    with run_directory() as run_dir:
        specs = plan_cluster(config, run_dir, os.environ, token=secrets.token_hex(16))
        kind_of_display = from_wing("cli.start_progress.display:ProgressDisplay") or StartDisplay
        display = kind_of_display([spec.name for spec in specs], config.serve.verbose, config.worker.log_format)
        for line in placed:
            display.tell(line)
        keep = call_wing("cli.restarts.restarts:restarts", config.serve) or until_death
        supervisor = Supervisor(specs, display, keep)
        asyncio.run(_serve(supervisor, display, ready_message(config, model.name)))
    return 0


def ready_message(config: ClusterConfig, model_name: str) -> str:
    """Return the message with the cluster's address and a command to try."""
    name = config.router.served_model_name or model_name
    # max_tokens: a small model that misses its end would generate until its context is full.
    messages = '[{"role": "user", "content": "Why is the sky blue?"}]'
    body = f'{{"model": "{name}", "max_tokens": 100, "messages": {messages}}}'
    key = " -H 'Authorization: Bearer '$MINI_INFER_API_KEY" if config.router.api_key else ""
    ports = "".join(f", {service} on :{port}" for service, port in config.metrics_ports.items())
    metrics = f"metrics: {config.url}/metrics{ports}\n" if ports else ""
    better = f"a better small model: --model {BETTER_MODEL}\n" if model_name == DEFAULT_MODEL_NAME else ""
    curl = f"curl {config.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    return f"{name} on {config.url} ({workers_of(config)})\n{metrics}try: {curl}\n{better}stop with Ctrl-C"


async def _serve(supervisor: Supervisor, display: StartDisplay, message: str) -> None:
    stopping = asyncio.Event()
    starting: asyncio.Task[None] | None = None

    def on_signal() -> None:
        if stopping.is_set():  # the second signal: stop at once
            supervisor.kill()
        stopping.set()
        if starting is not None:
            starting.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    grace_seconds = FAILED_START_GRACE_SECONDS
    try:
        with display:
            starting = asyncio.create_task(supervisor.start())
            await asyncio.wait([starting])
            error = None if starting.cancelled() else starting.exception()
            if isinstance(error, StartError):
                display.reveal(error.name, error.tail)
        if not starting.cancelled():
            starting.result()
            grace_seconds = float("inf")
            write_line(f"ready in {display.elapsed_seconds:.1f} s: {message}", sys.stdout)
            await supervisor.run(stopping)
            display.tell("stopping: open requests may finish; Ctrl-C again ends them")
    finally:
        await supervisor.stop(grace_seconds)


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """Make a private directory (mode 0700) for the cluster's Unix sockets; it is removed however the cluster ends.

    A shell that waits for the end of a pipe removes it. The pipe ends when we close it and also when we are killed,
    so that even after SIGKILL no directory is left.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir()
    path = Path(tempfile.mkdtemp(prefix="mini-infer-", dir=base))
    with subprocess.Popen(  # leaving the block closes its input and waits for its end
        ["/bin/sh", "-c", _REMOVE_AT_END_OF_PIPE, "sh", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath)},  # our own environment may hold an API key
        start_new_session=True,  # Ctrl-C must not end it before us
    ):
        yield path
