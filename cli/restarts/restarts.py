"""Restarts a service whenever it ends. `RestartPolicy` decides when."""

from __future__ import annotations

import asyncio
from functools import partial

from cli.cluster.plan import ServeConfig
from cli.cluster.service import Service
from cli.cluster.supervisor import Keep, ServiceDiedError, Supervisor, death
from cli.restarts.serve_settings import RestartSettings

FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 10.0


class RestartPolicy:
    """Decides after each death of one service how long to wait before its restart. Pure; it never gives up.

    The first restart is immediate, because open streams wait for it. Every further death doubles the delay, from
    FIRST_DELAY_SECONDS to MAX_DELAY_SECONDS. If the service was ready for longer than that, the delays start anew.
    """

    _delay = 0.0

    def next_delay(self, ready_seconds: float) -> float:
        """Return the seconds to wait after a death. ready_seconds: how long the service was ready; 0: never."""
        delay = 0.0 if ready_seconds > MAX_DELAY_SECONDS else self._delay
        self._delay = min(max(FIRST_DELAY_SECONDS, 2 * delay), MAX_DELAY_SECONDS)
        return delay


def restarts(config: ServeConfig) -> Keep:
    """Return the function that `serve` calls for each service, to restart it or fail when it ends."""
    return partial(restart, exit_on_failure=config.of(RestartSettings).exit_on_failure)


async def restart(supervisor: Supervisor, service: Service, exit_on_failure: bool = False) -> None:
    """Restart the service whenever it ends. exit_on_failure: raise ServiceDiedError unless the end was normal."""
    policy = RestartPolicy()
    loop = asyncio.get_running_loop()
    is_ready, since = True, loop.time()  # `Supervisor.start` waits until it is ready
    while True:
        code = await service.wait()
        if is_ready and code == 0:  # an operator stopped it: a drained worker has finished its requests
            supervisor.display.line("serve", f"{service.spec.name} ended normally: replacing it now")
        else:
            reason = death(service, code, is_ready)
            if exit_on_failure:
                raise ServiceDiedError(reason)
            delay = policy.next_delay(loop.time() - since if is_ready else 0.0)
            supervisor.display.line("serve", f"{reason}; restarting it {f'in {delay:g} s' if delay else 'now'}")
            await asyncio.sleep(delay)
        is_ready, since = await supervisor.spawn(service), loop.time()
