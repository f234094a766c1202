import asyncio
import re
import time

from cli.client.event_stream import RequestRecord
from cli.load.progress import RunProgress, shown
from cli.load.runner import closed_loop, open_loop
from cli.load.workload import PlannedRequest


class Sender:
    """Takes `seconds` for every request and remembers how many were open at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.num_open = 0
        self.most_open = 0

    async def __call__(self, request: PlannedRequest, scheduled: float, begin: float) -> RequestRecord:
        sent = time.perf_counter() - begin
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(self.seconds)
        self.num_open -= 1
        return RequestRecord(scheduled=scheduled, sent=sent, end=sent + self.seconds)


def requests(*times: float) -> list[PlannedRequest]:
    return [PlannedRequest(at, "x", 1) for at in times]


def ignore(_record: RequestRecord) -> None: ...


async def test_closed_loop_keeps_the_concurrency_and_sends_everything():
    send = Sender(0.005)
    records = await closed_loop(send, requests(*[0.0] * 20), 4, ignore)
    assert len(records) == 20
    assert send.most_open == 4


async def test_closed_loop_ends_with_its_time():
    send = Sender(0.02)
    records = await closed_loop(send, requests(*[0.0] * 1000), 2, ignore, stop_after_seconds=0.1)
    assert 2 <= len(records) < 30


async def test_open_loop_does_not_wait_for_answers():
    send, all_are_open = Sender(0.0), asyncio.Barrier(4)

    async def answer_when_all_are_open(request: PlannedRequest, scheduled: float, begin: float) -> RequestRecord:
        await all_are_open.wait()
        return await send(request, scheduled, begin)

    async with asyncio.timeout(60):
        records = await open_loop(answer_when_all_are_open, requests(0.0, 0.01, 0.02, 0.03), ignore)
    assert sorted(record.scheduled for record in records) == [0.0, 0.01, 0.02, 0.03]
    assert all(record.sent >= record.scheduled for record in records)


async def test_open_loop_with_a_bound_sends_late_instead_of_more():
    send = Sender(0.02)
    records = await open_loop(send, requests(0.0, 0.0, 0.0), ignore, concurrency=1)
    assert send.most_open == 1
    assert records[2].sent - records[2].scheduled >= 0.03


async def test_open_loop_leaves_out_what_is_due_after_its_time():
    assert len(await open_loop(Sender(0.0), requests(0.0, 0.01, 9.0), ignore, stop_after_seconds=1.0)) == 2


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
