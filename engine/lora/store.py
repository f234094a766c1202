"""Adapters in memory, by last use. A thread reads an adapter when the first request names it.

Requests name an `AdapterRef`, so nothing has to be announced: an adapter that was dropped, or that a new worker or
one that takes over a stream lacks, is read from its folder.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from common.errors import ConfigError, InvalidRequestError
from common.lora.adapter_ref import AdapterRef
from engine.lora.reader import AdapterFile
from engine.request import Request
from engine.wings import Figures

T = TypeVar("T")
Load = Future[T]


class AdapterStore(Generic[T]):
    """An LRU cache of adapters, whose layers have type T. Running requests keep theirs after it is dropped."""

    def __init__(
        self, open_file: Callable[[AdapterRef], AdapterFile], read: Callable[[str, AdapterFile], T], capacity: int
    ) -> None:
        self._open_file, self._read, self._capacity = open_file, read, capacity
        self._loads: OrderedDict[str, Future[T]] = OrderedDict()  # the most recently used is last
        self._files: dict[str, AdapterFile] = {}  # of these adapters
        self._on_change: Callable[[str, bool], None] = lambda name, is_there: None
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._num_loads = 0
        self._seconds: list[float] = []  # of loads since the last call of `figures`

    def prepare_request(self, request: Request) -> None:
        """See Adapters: beside a constraint that is compiled, if the request has one."""
        if request.adapter:
            is_loaded, is_compiled = self.readiness(request), request.is_ready
            request.is_ready = is_loaded if is_compiled is None else lambda: is_loaded() and is_compiled()

    def readiness(self, request: Request) -> Callable[[], bool]:
        """Start to read the request's adapter; the result tells when it may run. Raises InvalidRequestError."""
        return self._load_of(request.adapter, self._check(request)).done

    def preload(self, name: str) -> None:
        """Read the adapter before the first request. Raises ConfigError."""
        self.get(name)

    def get(self, name: str) -> T:
        """Return the adapter, reading it now if it was dropped. Raises ConfigError."""
        try:
            return self._load_of(name).result()
        except ConfigError:
            self._drop(name)  # so that the next request tries again
            raise

    def tell_of_changes(self, on_change: Callable[[str, bool], None]) -> None:
        """See Adapters."""
        self._on_change = on_change
        for name in self._loads:
            on_change(name, True)

    def figures(self) -> Figures:
        seconds, self._seconds = self._seconds, []
        return {
            "mini_infer_lora_adapters": [len(self._loads)],
            "mini_infer_lora_loads": [self._num_loads],
            "mini_infer_lora_load_seconds": seconds,
        }

    def _check(self, request: Request) -> AdapterFile:
        """Open the request's adapter. Raises InvalidRequestError if it does not fit or cannot serve the request."""
        try:
            file = self._files.get(request.adapter) or self._open(request.adapter)
        except ConfigError as error:
            folder = request.adapter.partition(":")[2]
            text = str(error).replace(folder, Path(folder).name) if folder else str(error)  # clients see no paths
            raise InvalidRequestError(text, "model") from None
        if request.params.prompt_logprobs is not None and file.changes_head:
            raise InvalidRequestError(
                "prompt_logprobs is not supported with an adapter of the output projection (lm_head)",
                "prompt_logprobs",
            )
        return file

    def _open(self, name: str) -> AdapterFile:
        """Open an adapter's files. Raises ConfigError."""
        return self._open_file(AdapterRef.parse(name))

    def _load_of(self, name: str, file: AdapterFile | None = None) -> Load[T]:
        load = self._loads.get(name)
        if load is None:
            load = self._start(name, file or self._open(name))
            while len(self._loads) > self._capacity:
                self._drop(next(iter(self._loads)))
        self._loads.move_to_end(name)
        return load

    def _start(self, name: str, file: AdapterFile) -> Load[T]:
        """Start to read an adapter."""
        self._files[name] = file
        load = self._loads[name] = self._thread.submit(self._timed_read, name, file)
        self._on_change(name, True)
        return load

    def _drop(self, name: str) -> None:
        if self._loads.pop(name, None) is not None:
            del self._files[name]
            self._on_change(name, False)

    def _timed_read(self, name: str, file: AdapterFile) -> T:
        began = time.perf_counter()
        adapter = self._read(name, file)
        self._num_loads += 1
        self._seconds.append(time.perf_counter() - began)
        return adapter
