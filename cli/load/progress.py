"""Progress of a run on standard error: a bar in a terminal, otherwise a line at intervals.

Drawn four times a second, because drawing takes the interpreter from the measured client.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from cli.client.event_stream import RequestRecord

LINE_SECONDS = 10.0


class RunProgress:
    """Counts of a run. `on_done` takes each finished request."""

    def __init__(self, total: int, open_records: Callable[[], Collection[RequestRecord]]) -> None:
        """open_records: returns requests in progress; each chunk counts as a token until their usage is known."""
        self.total = total
        self.num_done = 0
        self._num_failed = 0
        self._num_tokens = 0
        self._open_records = open_records
        self._begin = time.monotonic()

    def on_done(self, record: RequestRecord) -> None:
        self.num_done += 1
        self._num_failed += bool(record.error)
        self._num_tokens += record.num_output_tokens or len(record.chunk_times)

    def speed(self) -> str:
        """Return tokens per second since the start, and the number of failed requests."""
        tokens = self._num_tokens + sum(len(record.chunk_times) for record in self._open_records())
        rate = tokens / max(time.monotonic() - self._begin, 1e-9)
        return f"{rate:.0f} tok/s, {self._num_failed} failed"

    def line(self) -> str:
        """Return everything in one line, for a log."""
        seconds = time.monotonic() - self._begin
        return f"{self.num_done}/{self.total} requests in {seconds:.0f} s, {self.speed()}"


@contextlib.asynccontextmanager
async def shown(progress: RunProgress, line_seconds: float = LINE_SECONDS) -> AsyncIterator[None]:
    """Show the progress of the code inside the context."""
    if sys.stderr.isatty():
        with _bar(progress):
            yield
        return
    lines = asyncio.create_task(_write_lines(progress, line_seconds))
    try:
        yield
    finally:
        lines.cancel()


def _bar(progress: RunProgress) -> Progress:
    class Done(MofNCompleteColumn):
        def render(self, task: Task) -> Text:
            bar.update(task.id, completed=progress.num_done)
            return super().render(task)

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(progress.speed())

    columns = (TextColumn("requests"), BarColumn(), Done(), Speed(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
    bar.add_task("", total=progress.total)
    return bar


async def _write_lines(progress: RunProgress, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        print(progress.line(), file=sys.stderr, flush=True)
