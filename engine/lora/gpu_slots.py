"""Adapters in slots of GPU memory: who has which slot, and the tensors that kernels read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import accumulate

import torch

from common.errors import ConfigError
from common.lora.adapter_ref import AdapterRef
from engine.lora.gpu_file import GpuFile
from engine.lora.layers import Layer, Layers
from engine.lora.reader import AdapterFile
from engine.lora.store import AdapterStore
from engine.request import Request
from kernels.gpu.lora.low_rank import MAX_MODULES, SlotWeights

NEVER = -1


class GpuSlots:
    """layers: for each of the model's linear layers, None if adapters may not change it. embedding: likewise."""

    def __init__(self, layers: Layers, count: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count = count
        self.layers = [
            SlotWeights.empty(count, max_rank, len(layer.columns), starts_of(layer), dtype, device)
            if layer.modules else None
            for layer in layers.linears
        ]  # fmt: skip
        sizes = len(layers.tokens), (0, layers.hidden_size)
        self.embedding = SlotWeights.empty(count, max_rank, *sizes, dtype, device) if layers.embedding else None
        self._device, self._dtype = device, dtype
        self._file = GpuFile(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def fill(self, slot: int, file: AdapterFile) -> None:
        """Read the adapter into the slot, from any thread. Parts that it lacks get rank 0. Raises ConfigError."""
        with torch.cuda.stream(self._stream):  # no effect on a CPU
            read = file.read_parts(self._file.copy, self._dtype)
            ranks = torch.zeros(len(read), MAX_MODULES, dtype=torch.int32)
            for layer, parts in enumerate(read):
                for part in parts:
                    ranks[layer, part.number] = part.a.shape[0]
            of_layers = ranks.to(self._device)
            for weights, parts, own in zip((*self.layers, self.embedding), read, of_layers, strict=True):
                if weights is None:
                    continue
                for part in parts:
                    rank, rows = part.a.shape[0], slice(part.first, part.first + part.b.shape[0])
                    weights.a[slot, part.number, :rank] = part.a
                    torch.mul(part.b.T, part.scale, out=weights.b[slot, :rank, rows])
                weights.ranks[slot] = own[: weights.ranks.shape[1]]
        if self._stream is not None:
            self._stream.synchronize()


def starts_of(layer: Layer) -> tuple[int, ...]:
    """Return the first row of each module, and the number of rows. The modules are contiguous and fill the layer."""
    return tuple(accumulate((len(module.rows) for module in layer.modules), initial=0))


class SlotStore(AdapterStore[int]):
    """Adapters as slot numbers. A slot stays its adapter's as long as requests ask for it before every step."""

    def __init__(
        self, open_file: Callable[[AdapterRef], AdapterFile], fill: Callable[[int, AdapterFile], None], capacity: int,
        num_steps: int = 2,
    ) -> None:  # fmt: skip
        """num_steps: at most so many steps are in flight, counting the one that is planned."""
        super().__init__(open_file, self._read_into, capacity)
        self.num_steps = num_steps
        self._fill = fill
        self._vacant = list(range(capacity))
        self._slots: dict[str, int] = {}
        self._turn = 0  # counts questions
        self._asked_at: dict[str, int] = {}  # turn in which an adapter was last asked for

    def readiness(self, request: Request) -> Callable[[], bool]:
        """See AdapterStore. The adapter gets a slot when the request is asked and one is available."""
        question = SlotQuestion(self, request.adapter, self._check(request))
        question()
        return question

    def preload(self, name: str) -> None:
        """See AdapterStore. Adapters beyond the number of slots are read when a request names them."""
        if self._vacant:
            self.get(name)

    def get(self, name: str) -> int:
        """See AdapterStore. Running requests have asked for their adapter, so it has a slot."""
        if name not in self._loads:
            self.ask(name, self._open(name), NEVER)
        if name not in self._loads:
            raise ConfigError("more adapters are in use at once than --max-loras")
        return super().get(name)

    def ask(self, name: str, file: AdapterFile, unused_since: int) -> bool:
        """Whether the adapter is in a slot. It gets a free slot, or that of an adapter that nobody has asked for
        since the turn `unused_since`.
        """
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
        """Free the slot of the adapter that was asked for longest ago, if it may be taken."""
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
    """Slots of a rank other than the first, which reads an adapter when a plan names it, without questions before.

    The first rank ensures that a step names at most as many adapters as there are slots.
    """

    def get(self, name: str) -> int:
        """See AdapterStore. Takes the slot of the adapter that was used longest ago."""
        if name not in self._loads and not self._vacant:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # steps in flight read the slot
            self._vacate(self._turn + 1)
        slot = super().get(name)
        self._turn += 1
        self._asked_at[name] = self._turn
        return slot


class SlotQuestion:
    """Whether a request's adapter is in a slot; asked when a step that may have a row of the request is planned.

    A slot may be taken if nobody has asked for its adapter since this request's question of `num_steps` plans ago:
    running requests are asked first, so neither the planned step nor those in flight read that slot.
    """

    def __init__(self, store: SlotStore, name: str, file: AdapterFile) -> None:
        self._store, self._name, self._file = store, name, file
        self._asked = deque([NEVER] * store.num_steps, store.num_steps)  # turns of the last questions

    def __call__(self) -> bool:
        found = self._store.ask(self._name, self._file, self._asked[0])
        self._asked.append(self._store.turn)
        return found
