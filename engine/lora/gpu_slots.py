"""Adapters in slots of GPU memory: who has which, and what kernels read of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

from common.errors import ConfigError
from common.lora.adapter_ref import AdapterRef
from engine.lora.layers import Layer, Layers
from engine.lora.reader import AdapterFile
from engine.lora.store import AdapterStore
from engine.request import Request
from kernels.gpu.lora.low_rank import SlotWeights

NEVER = -1


class GpuSlots:
    """layers: of each of the model's linear layers, None where no adapter may change it. embedding: the same."""

    def __init__(self, layers: Layers, count: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count = count
        self.layers = [
            SlotWeights.empty(count, max_rank, len(layer.columns), starts_of(layer), dtype, device)
            if layer.modules else None
            for layer in layers.linears
        ]  # fmt: skip
        sizes = len(layers.tokens), (0, layers.hidden_size)
        self.embedding = SlotWeights.empty(count, max_rank, *sizes, dtype, device) if layers.embedding else None
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def fill(self, slot: int, file: AdapterFile) -> None:
        """Read the adapter into the slot, from any thread. What it has no part of gets rank 0. Raises ConfigError."""
        with torch.cuda.stream(self._stream):  # nothing on a CPU
            for weights, parts in zip((*self.layers, self.embedding), file.read_parts(self._device), strict=True):
                if weights is None:
                    continue
                ranks = torch.zeros(weights.ranks.shape[1], dtype=torch.int32)
                for part in parts:
                    rank, rows = part.a.shape[0], slice(part.first, part.first + part.b.shape[0])
                    ranks[part.number] = rank
                    weights.a[slot, part.number, :rank] = part.a
                    weights.b[slot, :rank, rows] = part.b.T.float() * part.scale
                weights.ranks[slot] = ranks.to(self._device)
        if self._stream is not None:
            self._stream.synchronize()


def starts_of(layer: Layer) -> tuple[int, ...]:
    """The first row of each module, and the number of rows. Modules lie one after the other, and fill the layer."""
    return tuple(accumulate((len(module.rows) for module in layer.modules), initial=0))


class SlotStore(AdapterStore[int]):
    """An adapter is the number of its slot, which stays its own while requests ask for it before every step."""

    def __init__(
        self, open_file: Callable[[AdapterRef], AdapterFile], fill: Callable[[int, AdapterFile], None], capacity: int
    ) -> None:
        super().__init__(open_file, self._read_into, capacity)
        self._fill = fill
        self._vacant = list(range(capacity))
        self._slots: dict[str, int] = {}
        self._turn = 0  # counts questions
        self._asked_at: dict[str, int] = {}  # when an adapter was asked for last

    def readiness(self, request: Request) -> Callable[[], bool]:
        """See AdapterStore. An adapter gets a slot when the request is asked, as soon as there is one."""
        question = SlotQuestion(self, request.adapter, self._check(request))
        question()
        return question

    def preload(self, name: str) -> None:
        """See AdapterStore. Those beyond the number of slots are read when a request names them."""
        if self._vacant:
            self.get(name)

    def get(self, name: str) -> int:
        """See AdapterStore. Requests that run have asked for theirs, so it is in a slot."""
        if name not in self._loads:
            self.ask(name, self._open(name), NEVER)
        if name not in self._loads:
            raise ConfigError("more adapters are in use at once than --max-loras")
        return super().get(name)

    def ask(self, name: str, file: AdapterFile, unused_since: int) -> bool:
        """Whether the adapter is in a slot. It gets one if one is free, or belongs to an adapter that nobody has
        asked for since that turn."""
        self._turn += 1
        load = self._loads.get(name)
        if load is None:
            if not self._vacant and not self._vacate(unused_since):
                return False
            self._slots[name] = self._vacant.pop()
            load = self._start(name, file)
        self._asked_at[name] = self._turn
        return load.done()

    @property
    def turn(self) -> int:
        return self._turn

    def _vacate(self, unused_since: int) -> bool:
        """Take the slot of the adapter that was asked for longest ago."""
        name = min(self._loads, key=lambda each: self._asked_at[each])
        if self._asked_at[name] >= unused_since or not self._loads[name].done():
            return False
        self._drop(name)
        return True

    def _drop(self, name: str) -> None:
        if name in self._loads:
            self._vacant.append(self._slots.pop(name))
            del self._asked_at[name]
        super()._drop(name)

    def _read_into(self, name: str, file: AdapterFile) -> int:
        slot = self._slots[name]
        self._fill(slot, file)
        return slot


class FollowedSlots(SlotStore):
    """Slots of a rank other than the first, which reads an adapter when a plan names it: nobody asks it before.

    The first rank sees to it that a step names at most as many adapters as there are slots.
    """

    def get(self, name: str) -> int:
        """See AdapterStore. Takes the slot of the adapter that was asked for longest ago."""
        if name not in self._loads and not self._vacant:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # steps in flight read it
            self._vacate(self._turn + 1)
        slot = super().get(name)
        self._turn += 1
        self._asked_at[name] = self._turn
        return slot


class SlotQuestion:
    """Whether a request's adapter is in a slot, asked when a step is planned that may have a row of the request.

    A slot may be taken from an adapter when nobody has asked for it since this request was asked the time before the
    last: requests that run are asked first, so neither the step that is planned nor the one in flight reads it.
    """

    def __init__(self, store: SlotStore, name: str, file: AdapterFile) -> None:
        self._store, self._name, self._file = store, name, file
        self._asked = NEVER, NEVER  # the turns of the last two times

    def __call__(self) -> bool:
        before_last, last = self._asked
        found = self._store.ask(self._name, self._file, before_last)
        self._asked = last, self._store.turn
        return found
