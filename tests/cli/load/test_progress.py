import asyncio
import re

from cli.event_stream import RequestRecord
from cli.load.progress import RunProgress, shown


async def test_lines_for_a_log(capsys):
    open_records = [RequestRecord(chunk_times=[0.1] * 30)]
    progress = RunProgress(4, lambda: open_records)
    async with shown(progress, line_seconds=0.02):
        progress.on_done(RequestRecord(num_output_tokens=10))
        progress.on_done(RequestRecord(error="timeout"))
        said = ""
        async with asyncio.timeout(60):
            while not said:
                await asyncio.sleep(0.01)
                said = capsys.readouterr().err
    first, *_ = said.splitlines()
    assert re.fullmatch(r"2/4 requests in \d+ s, [\d.]+ tok/s, 1 failed", first), first
    assert float(first.split()[5]) > 0
    capsys.readouterr()
    await asyncio.sleep(0.04)
    assert capsys.readouterr().err == ""
