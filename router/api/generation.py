"""All choices of one request: run them, in the right order, and merge what they say.

The first choice of a prompt starts alone; the others start when its prompt is computed, so that they find it in
the prefix cache. When the request's time is over, choices end with the text that they have (decision 0090). Calls
dispatch for tokens and choice for text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from common.errors import DeadlineExceededError
from protos import types_pb2 as pb
from router.api.choice import Choice, Update
from router.api.render import Usage
from router.dispatch import Dispatcher
from router.journal import Journal

MERGE_QUEUE_SIZE = 256  # updates that a slow reader may be behind, over all choices


@dataclass(slots=True, eq=False)
class ChoiceRun:
    """One choice, ready to run."""

    choice: Choice
    journal: Journal
    prompt_index: int = 0


@dataclass(slots=True, eq=False)
class _Prompt:
    """What the choices of one prompt share."""

    is_computed: asyncio.Event = field(default_factory=asyncio.Event)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)


class Generation:
    """The choices of a request. `updates` may be iterated once; leaving it early cancels what is still open."""

    def __init__(self, dispatcher: Dispatcher, runs: list[ChoiceRun]) -> None:
        self._dispatcher = dispatcher
        self.runs = runs
        prompts = {run.prompt_index: len(run.journal.prompt_token_ids) for run in runs}
        self._num_prompt_tokens = sum(prompts.values())

    def usage(self) -> Usage:
        """Counts so far. A prompt counts once, however many choices it has."""
        first: dict[int, Journal] = {}
        for run in self.runs:
            first.setdefault(run.prompt_index, run.journal)
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(run.choice.num_tokens for run in self.runs),
            cached_tokens=sum(journal.num_cached_tokens for journal in first.values()),
        )

    async def updates(self) -> AsyncGenerator[tuple[int, Update], None]:
        """(choice index, update) as they come. Raises the first error of any choice."""
        if len(self.runs) == 1:
            run = self.runs[0]
            async with aclosing(self._updates_of(run)) as updates:
                async for update in updates:
                    yield run.choice.index, update
            return
        async with aclosing(self._merged()) as merged:
            async for item in merged:
                yield item

    async def _updates_of(self, run: ChoiceRun) -> AsyncGenerator[Update, None]:
        """One choice, to its end."""
        try:
            async with aclosing(self._dispatcher.generate(run.journal)) as steps:
                async for deltas in steps:
                    update = run.choice.push(deltas)
                    yield update
                    if update.finish_reason is not None:
                        run.journal.outcome = update.finish_reason
                        return
        except DeadlineExceededError:
            if not any(each.journal.has_started for each in self.runs):
                raise
            yield run.choice.cut()

    async def _merged(self) -> AsyncGenerator[tuple[int, Update], None]:
        queue: asyncio.Queue[tuple[int, Update] | Exception] = asyncio.Queue(MERGE_QUEUE_SIZE)
        prompts: dict[int, _Prompt] = {}
        tasks = []
        for run in self.runs:
            is_leader = run.prompt_index not in prompts
            prompt = prompts.setdefault(run.prompt_index, _Prompt())
            tasks.append(asyncio.create_task(self._run_one(run, prompt, is_leader, queue)))
        open_choices = len(tasks)
        try:
            while open_choices:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                open_choices -= item[1].finish_reason is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_one(
        self,
        run: ChoiceRun,
        prompt: _Prompt,
        is_leader: bool,
        queue: asyncio.Queue[tuple[int, Update] | Exception],
    ) -> None:
        if not is_leader:
            await prompt.is_computed.wait()
        is_first = True
        try:
            async with aclosing(self._updates_of(run)) as updates:
                async for update in updates:
                    if is_first:
                        is_first = False
                        if is_leader:
                            prompt.logprobs = update.prompt_logprobs
                            prompt.is_computed.set()
                        update.prompt_logprobs = prompt.logprobs
                    await queue.put((run.choice.index, update))
        except Exception as error:  # noqa: BLE001 - raised where the choices are merged, bugs too: else it waits for ever
            await queue.put(error)
