"""A parent for `test_supervisor.py` to kill: `python -m tests.cli.cluster.small_cluster PORT PORT EVENTS`."""

import asyncio
import os
import sys

from cli.cluster.child import child_command
from cli.cluster.progress import StartDisplay
from cli.cluster.serve import run_directory
from cli.cluster.service import ServiceSpec
from cli.cluster.supervisor import Supervisor, until_death


async def main() -> None:
    *ports, events = sys.argv[1:]
    with run_directory() as path:
        (path / "a.sock").touch()
        specs = [
            ServiceSpec(
                f"s{port}",
                child_command("tests.harness.stand_in", ("well", port, events, f"s{port}")),
                f"http://127.0.0.1:{port}/",
                env=os.environ,
            )
            for port in ports
        ]
        supervisor = Supervisor(specs, StartDisplay([spec.name for spec in specs], show_logs=False), until_death)
        await supervisor.start()
        print(f"ready {path}", flush=True)
        await supervisor.run(asyncio.Event())


asyncio.run(main())
