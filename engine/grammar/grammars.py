"""Computes which tokens may come next in an answer that follows a grammar, with llguidance.

llguidance parses a token in microseconds, and stops at its limits, for that request alone. Knows one model's tokens,
but neither requests nor logits.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from common.errors import GRAMMAR_REFUSED, EngineError, InvalidRequestError
from common.grammar.grammar import LIMITS, TOO_COMPLEX, for_llguidance, grammar_error
from common.grammar.unique_places import SPECIAL, unique_places
from common.text.tokenizer import Tokenizer
from engine.grammar.mask_thread import MaskThread, Task
from engine.grammar.unique_tokens import TokenTable, UniqueTokens
from engine.logit_rules.filters import Words

NUM_CACHED = 16  # compiled grammars per engine; each may have 8,000 states of 1 to 2 kB
NUM_REPLAYED = 512  # tokens of an answer from elsewhere, replayed at a time: 1 ms of the 2 that each task has
# Processor time for an answer's masks. Schemas written by people take 0.04 ms a token, 0.6 at most.
ANSWER_SECONDS, TOKEN_SECONDS = 0.05, 0.001


class GrammarMatcher:
    """Follows one answer. Takes back tokens that were drafts or belong to a repeated step."""

    def __init__(
        self,
        matcher: LLMatcher,
        num_words: int,
        masks: MaskThread,
        on_error: Callable[[], None],
        unique: UniqueTokens | None = None,
    ) -> None:
        """on_error: called at a limit, which also ends all copies, as they share the matcher's automaton."""
        self._unique = unique
        self._matcher = matcher
        self._num_words = num_words
        self._masks = masks
        self._on_error = on_error
        self._consumed: list[int] = []
        self._seconds = 0.0  # processor time
        self._error = ""
        self._ready: dict[int, Words | None] = {}  # by the length of the output before the mask

    def allowed(self, output_token_ids: list[int]) -> Words | None:
        """Return the tokens that may follow this output, with the end of the sequence where the grammar may end.

        None: the output does not follow the grammar, so nothing is known. Raises EngineError at a limit.
        """
        if len(output_token_ids) not in self._ready:
            compute_masks([(self, output_token_ids)])
        if self._error:
            raise EngineError(self._error)
        return self._ready.pop(len(output_token_ids))

    def compute(self, output_token_ids: list[int]) -> None:
        """Compute the mask that `allowed` returns, or the reason why there is none."""
        if self._error:
            return
        began = time.thread_time()
        words = self._mask() if self._follow(output_token_ids) else None
        self._seconds += time.thread_time() - began
        if self._matcher.is_error():
            self.fail(grammar_error(self._matcher.get_error()))
        elif self._seconds > ANSWER_SECONDS + TOKEN_SECONDS * len(output_token_ids):
            self.fail(f"{TOO_COMPLEX}: its masks take more than {TOKEN_SECONDS * 1e3:.0f} ms a token")
        self._ready[len(output_token_ids)] = words

    def replay(self, output_token_ids: list[int]) -> None:
        """Follow the beginning of an output without computing its mask."""
        if not self._error:
            self._follow(output_token_ids)

    def fail(self, error: str) -> None:
        """End the answer with this error."""
        self._error = self._error or error
        self._on_error()

    def _follow(self, output_token_ids: list[int]) -> bool:
        """Consume an output's new tokens, and roll back those that differ. Returns whether it follows the grammar."""
        num_same = len(self._consumed)
        while self._consumed[:num_same] != output_token_ids[:num_same]:
            num_same -= 1
        if num_same < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - num_same)
            del self._consumed[num_same:]
        new = output_token_ids[num_same:]
        count = self._matcher.try_consume_tokens(new)
        self._consumed += new[:count]
        is_unique = self._unique is None or self._unique.follow(num_same, self._consumed)
        return count == len(new) and is_unique and not self._matcher.is_error()

    def _mask(self) -> Words:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._num_words]
        if self._unique is None or self._matcher.is_error():
            return words
        words = self._unique.without_repeats(words)
        if not words.any():
            self.fail("the grammar allows no other item (uniqueItems)")
        return words


def compute_masks(wanted: Sequence[tuple[GrammarMatcher, list[int]]]) -> None:
    """Compute a step's masks, for matchers of one model and their outputs, so that `allowed` has them.

    An answer whose mask takes too long fails, and the step continues without it.
    """
    tasks: list[Task] = []
    for matcher, output in wanted:
        matcher._ready.clear()
        for end in range(len(matcher._consumed) + NUM_REPLAYED, len(output), NUM_REPLAYED):
            tasks.append((matcher.replay, matcher.fail, output[:end]))
        tasks.append((matcher.compute, matcher.fail, output))
    if wanted:
        wanted[0][0]._masks.run(tasks)


class Grammars:
    """Matchers over one model's tokens. A separate thread loads the tokenizer and compiles grammars.

    Thread-safe. The first grammar waits for the tokenizer unless `prepare` was called.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """vocab_size: of the model, which may have more tokens than its tokenizer."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._tokens: LLTokenizer | None = None
        self._table: TokenTable | None = None  # made for the first grammar that needs it
        self._known: WeakValueDictionary[str, Future[LLMatcher]] = WeakValueDictionary()  # grammars in use
        self._recent: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # the most recently used is last
        self._executor: ThreadPoolExecutor | None = None
        self._masks = MaskThread()
        self._lock = threading.Lock()

    def prepare(self) -> Future[object]:
        """Load the tokenizer: 0.5 s for 49,000 tokens, most of it holding the GIL.

        If the model has no tokenizer, the future has an exception, which the first grammar raises again.
        """
        with self._lock:
            return self._thread().submit(self._load_tokens)

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """Compile a grammar and its first mask. While the future is held, `start` finds it."""
        with self._lock:
            compiled = self._known.get(grammar)
            if compiled is None:
                compiled = self._known[grammar] = self._thread().submit(self._compile, grammar)
            self._recent[grammar] = compiled
            self._recent.move_to_end(grammar)
            if len(self._recent) > NUM_CACHED:
                self._recent.popitem(last=False)
            return compiled

    def start(self, grammar: str) -> Future[GrammarMatcher]:
        """Start a matcher for a new answer. The future raises InvalidRequestError, EngineError."""
        started: Future[GrammarMatcher] = Future()

        def take(compiled: Future[LLMatcher]) -> None:
            error = compiled.exception()
            if error is not None:
                started.set_exception(error)
                return
            copy = compiled.result().deep_copy()
            places = None if self._table is None else unique_places(grammar, self._table.special)
            unique = None if places is None or self._table is None else UniqueTokens(places, self._table)
            num_words = -(-self._vocab_size // 32)
            started.set_result(GrammarMatcher(copy, num_words, self._masks, lambda: self._forget(grammar), unique))

        self.compile(grammar).add_done_callback(take)
        return started

    def _thread(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        return self._executor

    def _load_tokens(self) -> LLTokenizer:
        if self._tokens is None:
            self._tokens = _tokens_of(self._load_tokenizer(), self._vocab_size)
        return self._tokens

    def _compile(self, grammar: str) -> LLMatcher:
        compiled = LLMatcher(self._load_tokens(), for_llguidance(grammar), log_level=0, limits=LIMITS)
        compiled.compute_bitmask()  # copies include the mask
        if compiled.is_error():
            raise InvalidRequestError(grammar_error(compiled.get_error()))
        if self._table is None and unique_places(grammar) is not None:
            self._table = _table_of(self._load_tokenizer(), self._vocab_size)
        return compiled

    def _forget(self, grammar: str) -> None:
        with self._lock:
            self._known.pop(grammar, None)
            self._recent.pop(grammar, None)


class _TokenBytes:
    """Tokens for `TokenizerWrapper`: the detokenizer's bytes, empty for ids without a token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(max(vocab_size, tokenizer.vocab_size))]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))


def _table_of(tokenizer: Tokenizer, vocab_size: int) -> TokenTable:
    tokens = _TokenBytes(tokenizer, vocab_size).tokens
    for token_id in tokenizer.special_ids:
        tokens[token_id] = SPECIAL + tokens[token_id]
    return TokenTable(tokens, tuple(sorted(tokenizer.special_id_of)))


def _tokens_of(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    if not tokenizer.eos_token_ids:
        raise InvalidRequestError(f"{GRAMMAR_REFUSED}cannot end: this model has no token that ends an answer")
    return LLTokenizer(TokenizerWrapper(_TokenBytes(tokenizer, vocab_size)), eos_token=list(tokenizer.eos_token_ids))
