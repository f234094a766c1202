"""The in-process Python API: one engine, no services, no threads of its own. `async_llm` is its sibling for asyncio.

from mini_infer import LLM, SamplingParams
LLM().generate(["The capital of France is"], SamplingParams(max_tokens=8))

Several streams may be open at once, and several threads may call: a thread that waits for a token runs the next step
for everyone, and puts the others' outputs into their mailboxes. docs/decisions/command-line-and-python-api.md says
why.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from common.errors import EngineError
from engine.offline.arguments import Message, Prompt, stop_strings
from engine.offline.embeddings import Embedding, Vectors, vector_params
from engine.offline.mailboxes import Item, Mailboxes, TokensAndParams
from engine.offline.text_engine import Answers, Completion, OfflineModel, TextStream
from engine.request import Request, RequestOutput, SamplingParams


class LLM:
    """A model that answers, from any number of threads. See `generate`, `stream`, `chat` and `embed`.

    model: a directory, a .gguf file, a hub id or "dry-run"; empty: the default model. Settings are the flags of
    `serve` for engine and GPU: `LLM(model, tp=2, max_model_len=4096)`. Loads the model, which takes seconds. Raises
    ConfigError with what to do.

    When the engine itself fails (a lost GPU), every open call raises EngineError with that as its cause, and so does
    every later call.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._model = OfflineModel.load(model, settings)
        self.engine = self._model.engine  # for inspection: stepping it would take other callers' tokens
        self.model_config = self._model.model_config
        self.tokenizer = self._model.tokenizer
        self._mailboxes = Mailboxes[deque[Item]](self.engine)
        self._turns = _Turns()  # held around everything that touches the engine
        self._left: deque[Request] = deque()  # their callers have gone; the next holder of the turn aborts them

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: str | Sequence[str] = (),
        adapter: str = "",
    ) -> list[Completion]:
        """Complete all prompts, batched; one completion per prompt, in their order.

        prompts: texts or lists of token ids, or one of these alone. params: for all of them, or one per prompt.
        stop: texts that end an answer, which is cut before them. adapter: folder of a LoRA adapter that answers, with
        `enable_lora`.
        Raises InvalidRequestError for a prompt that cannot work (none is started then), EngineError when one fails.
        """
        return self._answer(self._model.encode(prompts, params, adapter), stop, continues=True)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, stop: str | Sequence[str] = (), adapter: str = ""
    ) -> Generator[str]:
        """Yield the text of one completion as it is generated, in pieces of whole characters.

        Starts with the first `next`. Closing the iterator, or dropping it, ends the generation and frees its blocks.
        Raises, at the first `next`, InvalidRequestError; later EngineError.
        """
        text = TextStream(self.tokenizer, stop_strings(stop), continues=True)
        requests, mailbox = self._open(self._model.encode([prompt], params, adapter))
        try:
            while not text.has_ended:
                if piece := text.push(self._receive(mailbox)):
                    yield piece
        finally:
            self._leave(requests)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop: str | Sequence[str] = (),
        adapter: str = "",
    ) -> Completion:
        """Answer a conversation in the model's own chat template. Raises like `generate`.

        chat_template_kwargs: variables that the template knows, such as `enable_thinking`.
        """
        prompt = self._model.encode_chat(messages, chat_template_kwargs)
        return self._answer(self._model.encode(prompt, params, adapter), stop, continues=False)[0]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "auto",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> list[Embedding]:
        """Give the vector of each prompt, in their order. Raises like `generate`.

        pooling: the last token's hidden state (`last`), the mean of all (`mean`), the first token's (`cls`), or what
        the model's folder says (`auto`). dimensions: keep a vector's first numbers. normalize: these, to length 1.
        """
        asked = self._model.encode(prompts, vector_params(pooling, dimensions))
        vectors = Vectors(len(asked), normalize, dimensions)
        requests, mailbox = self._open(asked)
        try:
            while vectors.num_open:
                vectors.add(self._receive(mailbox))
        finally:
            self._leave(requests)
        return vectors.embeddings(requests)

    def _answer(
        self, asked: Sequence[TokensAndParams], stop: str | Sequence[str], continues: bool
    ) -> list[Completion]:
        answers = Answers(len(asked), self.tokenizer, stop, continues)
        requests, mailbox = self._open(asked)
        try:
            while answers.num_open:
                output = self._receive(mailbox)
                if answers.add(output):
                    self._leave([output.request])
        finally:
            self._leave(requests)
        return answers.completions(requests)

    # -- taking turns at the engine --------------------------------------------------------------------------

    def _open(self, asked: Sequence[TokensAndParams]) -> tuple[list[Request], deque[Item]]:
        mailbox: deque[Item] = deque()
        with self._turn():
            return self._mailboxes.open(asked, mailbox), mailbox

    def _receive(self, mailbox: deque[Item]) -> RequestOutput:
        """The next output in `mailbox`; steps the engine while there is none."""
        while not mailbox:
            with self._turn():
                if not mailbox:  # else another thread's step has filled it meanwhile
                    self._step()
        item = mailbox.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def _step(self) -> None:
        assert self._mailboxes.has_work(), "somebody waits for a request that is not in the engine"
        try:
            _deliver(self._mailboxes.step())
        except BaseException:  # Ctrl-C: what the step had for the others is lost
            _deliver(self._mailboxes.end_open(lambda: EngineError("a step was interrupted")))
            raise

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the engine exclusively."""
        try:
            with self._turns:
                yield
        finally:
            self._abort_left()

    def _leave(self, requests: Sequence[Request]) -> None:
        """Abort what has not ended. Never waits: the collector may close a stream inside a step of its own thread."""
        self._left.extend(requests)
        self._abort_left()

    def _abort_left(self) -> None:
        """Abort requests whose callers have gone, unless another thread holds the turn: it does so when done."""
        while self._left and self._turns.try_take():
            try:
                while self._left:
                    self._mailboxes.close([self._left.popleft()])
            finally:
                self._turns.give_back()


def _deliver(items: Sequence[tuple[deque[Item], Item]]) -> None:
    for mailbox, item in items:
        mailbox.append(item)


class _Turns:
    """A fair lock: its holder cannot take it again ahead of a waiting thread.

    Next to a thread running 2 ms steps back to back, a second thread waited for up to 25 of them with a
    `threading.Lock`, and for one with this.
    """

    def __init__(self) -> None:
        self._queue = threading.Lock()  # held by the first of those who wait
        self._turn = threading.Lock()

    def __enter__(self) -> None:
        with self._queue:
            self._turn.acquire()

    def __exit__(self, *_: object) -> None:
        self._turn.release()

    def try_take(self) -> bool:
        return self._turn.acquire(blocking=False)

    def give_back(self) -> None:
        self._turn.release()
