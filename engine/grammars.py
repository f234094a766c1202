"""Which tokens may come next in an answer that follows a grammar, over llguidance.

It parses a token in microseconds, and gives up where its limits are reached, for that request alone. Knows one
model's tokens, no requests and no logits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from common.errors import EngineError, InvalidRequestError
from common.text.grammar import LIMITS, for_llguidance
from common.text.tokenizer import Tokenizer

NUM_CACHED = 64  # compiled grammars of an engine
Words = NDArray[np.uint32]  # one bit a token: bit i of word w is token 32 w + i


class GrammarMatcher:
    """Follows one answer. Tokens that were drafts, or belong to a step that is repeated, are taken back."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._consumed: list[int] = []

    def allowed(self, output_token_ids: list[int]) -> Words | None:
        """Tokens that may follow this output, the end of the sequence where the grammar can end.

        None: the output does not follow the grammar, so that nothing can be said. Raises EngineError at a limit.
        """
        num_same = len(self._consumed)
        while self._consumed[:num_same] != output_token_ids[:num_same]:
            num_same -= 1
        if num_same < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - num_same)
            del self._consumed[num_same:]
        new = output_token_ids[num_same:]
        count = self._matcher.try_consume_tokens(new)
        self._consumed += new[:count]
        self._check()
        if count < len(new):
            return None
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._num_words]
        self._check()
        return words

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the grammar is too complex: {self._matcher.get_error().splitlines()[0][:200]}")


class Grammars:
    """Matchers over one model's tokens. The tokenizer is loaded, and grammars are compiled, on a thread of their own.

    Safe to use from several threads.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """vocab_size: of the model, which may have more tokens than its tokenizer."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # at their first token; the last used one last
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def start(self, grammar: str) -> Future[GrammarMatcher]:
        """Compile a grammar for a new answer. The future raises InvalidRequestError, EngineError."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        return self._executor.submit(self._matcher, grammar)

    def _matcher(self, grammar: str) -> GrammarMatcher:
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            if self._tokens is None:
                self._tokens = _tokens_of(self._load_tokenizer(), self._vocab_size)
            compiled = LLMatcher(self._tokens, for_llguidance(grammar), log_level=0, limits=LIMITS)
            if compiled.is_error():
                raise InvalidRequestError(f"the grammar is not valid: {compiled.get_error()[:500]}")
        self._compiled[grammar] = compiled
        if len(self._compiled) > NUM_CACHED:
            self._compiled.popitem(last=False)
        return GrammarMatcher(compiled.deep_copy(), -(-self._vocab_size // 32))


class _TokenBytes:
    """Tokens as `TokenizerWrapper` wants them: the bytes that the detokenizer gives, none for ids without a token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(max(vocab_size, tokenizer.vocab_size))]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))


def _tokens_of(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    if not tokenizer.eos_token_ids:
        raise InvalidRequestError("this model has no token that ends an answer: it takes no grammars")
    return LLTokenizer(TokenizerWrapper(_TokenBytes(tokenizer, vocab_size)), eos_token=list(tokenizer.eos_token_ids))
