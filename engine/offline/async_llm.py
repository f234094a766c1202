"""The in-process Python API for asyncio: any number of tasks share one engine, which a thread of its own steps.

async with AsyncLLM() as llm:
    async for piece in llm.stream("The capital of France is", SamplingParams(max_tokens=8)):
        print(piece, end="")

Only the engine thread touches the engine: callers send it functions, and it answers into their queues.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Self

from common.errors import UnavailableError
from engine.offline.arguments import Message, Prompt, stop_strings
from engine.offline.embeddings import Embedding, Vectors, vector_params
from engine.offline.mailboxes import Item, Mailboxes, TokensAndParams
from engine.offline.text_engine import Answers, Completion, OfflineModel, TextStream
from engine.request import Request, RequestOutput, SamplingParams

Command = Callable[[], None]


class _Caller:
    """One `generate` or `stream` call: its event loop, its queue and, when it has started, its requests."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests: list[Request] = []
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, item: Item) -> None:
        """Deliver an output or the error that ends the call. Runs on the caller's event loop."""
        self._items.put_nowait(item)

    async def receive(self) -> RequestOutput:
        """Wait for the next output. Raises the exception that ended the call."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item


class AsyncLLM:
    """A model that answers any number of tasks, of any event loops. See `generate`, `stream`, `chat` and `embed`.

    Model and settings are those of `LLM`. Loads the model before it returns, which takes seconds: in a program that
    serves already, `await asyncio.to_thread(AsyncLLM, model)`. Raises ConfigError with what to do.

    A task that is cancelled, or that leaves a stream, ends its generation and frees its blocks; the others go on.
    When the engine itself fails (a lost GPU), every open call raises EngineError with that as its cause, and so does
    every later call. `async with` or `close` ends the thread.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._model = OfflineModel.load(model, settings)
        self.engine = self._model.engine  # to look at while nothing is open: it belongs to the thread
        self.model_config = self._model.model_config
        self.tokenizer = self._model.tokenizer
        self._mailboxes = Mailboxes[_Caller](self.engine)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: the end
        self._closing = threading.Lock()  # nothing is sent after the None that ends the thread
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Fail open calls with UnavailableError and stop the thread after the current step. Idempotent."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: str | Sequence[str] = (),
        adapter: str = "",
    ) -> list[Completion]:
        """Complete all prompts, batched with everyone else's; one completion per prompt, in their order.

        prompts: texts or lists of token ids, or one of these alone. params: for all of them, or one per prompt.
        stop: texts that end an answer, which is cut before them. adapter: folder of a LoRA adapter that answers, with
        `enable_lora`.
        Raises InvalidRequestError for a prompt that cannot work (none is started then), EngineError when one fails,
        UnavailableError after `close`.
        """
        asked = await asyncio.to_thread(self._model.encode, prompts, params, adapter)  # a long prompt takes a while
        return await self._answer(asked, stop, continues=True)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, stop: str | Sequence[str] = (), adapter: str = ""
    ) -> AsyncGenerator[str]:
        """Yield the text of one completion as it is generated, in pieces of whole characters. Raises like `generate`.

        Starts with the first `anext`. A caller that stops early should call `aclose` (`contextlib.aclosing`); else
        the generation goes on until the iterator is garbage collected.
        """
        asked = await asyncio.to_thread(self._model.encode, [prompt], params, adapter)
        text = TextStream(self.tokenizer, stop_strings(stop), continues=True)
        caller = self._open(asked)
        try:
            while not text.has_ended:
                if piece := text.push(await caller.receive()):
                    yield piece
        finally:
            self._leave(caller)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop: str | Sequence[str] = (),
        adapter: str = "",
    ) -> Completion:
        """Answer a conversation in the model's own chat template, as `LLM.chat` does. Raises like `generate`."""
        prompt = await asyncio.to_thread(self._model.encode_chat, messages, chat_template_kwargs)
        asked = await asyncio.to_thread(self._model.encode, prompt, params, adapter)
        return (await self._answer(asked, stop, continues=False))[0]

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "auto",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> list[Embedding]:
        """Give the vector of each prompt, as `LLM.embed` does. Raises like `generate`."""
        asked = await asyncio.to_thread(self._model.encode, prompts, vector_params(pooling, dimensions))
        vectors = Vectors(len(asked), normalize, dimensions)
        caller = self._open(asked)
        try:
            while vectors.num_open:
                vectors.add(await caller.receive())
        finally:
            self._leave(caller)
        return vectors.embeddings(caller.requests)

    async def _answer(
        self, asked: Sequence[TokensAndParams], stop: str | Sequence[str], continues: bool
    ) -> list[Completion]:
        answers = Answers(len(asked), self.tokenizer, stop, continues)
        caller = self._open(asked)
        try:
            while answers.num_open:
                output = await caller.receive()
                if answers.add(output):
                    self._leave(caller, [output.request])
        finally:
            self._leave(caller)
        return answers.completions(caller.requests)

    # -- on the callers' side --------------------------------------------------------------------------------

    def _open(self, asked: Sequence[TokensAndParams]) -> _Caller:
        caller = _Caller()
        with self._closing:
            if self._is_closed:
                raise _closed()
            if not self._thread.is_alive():
                raise UnavailableError("a forked process does not have the engine's thread: make the AsyncLLM in it")
            self._commands.put(lambda: self._start(caller, asked))
        return caller

    def _leave(self, caller: _Caller, requests: Sequence[Request] | None = None) -> None:
        """Abort these requests of the caller, or all, if they have not ended.

        Queued behind the command that opens them, so it may run before the caller has requests.
        """
        self._commands.put(lambda: self._mailboxes.close(caller.requests if requests is None else requests))

    # -- on the engine thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._run_commands():
            if self._mailboxes.has_work():
                self._deliver(self._mailboxes.step())
        self._deliver(self._mailboxes.end_open(_closed))

    def _run_commands(self) -> bool:
        """Run queued commands, waiting for one while there is nothing to step; False once closed."""
        while not (self._mailboxes.has_work() and self._commands.empty()):
            command = self._commands.get()
            if command is None:
                return False
            try:
                command()
            except Exception as error:  # noqa: BLE001 - only a bug raises here; its caller must not wait forever
                self._deliver(self._mailboxes.fail(error))
        return True

    def _start(self, caller: _Caller, asked: Sequence[TokensAndParams]) -> None:
        try:
            caller.requests = self._mailboxes.open(asked, caller)
        except Exception as error:  # noqa: BLE001 - what a prompt of the wrong type raises too; its caller hears it
            self._deliver([(caller, error)])

    def _deliver(self, items: Sequence[tuple[_Caller, Item]]) -> None:
        """Wake every event loop once, however many of its tasks get something."""
        of_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Caller, Item]]] = defaultdict(list)
        for caller, item in items:
            of_loop[caller.loop].append((caller, item))
        for loop, batch in of_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop is closed, so there is no waiter
                for caller, _ in batch:
                    self._mailboxes.close(caller.requests)


def _put_all(batch: Sequence[tuple[_Caller, Item]]) -> None:
    for caller, item in batch:
        caller.put(item)


def _closed() -> UnavailableError:
    return UnavailableError("this AsyncLLM is closed")
