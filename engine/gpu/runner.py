"""Executes plans on a GPU: decode steps as graphs, steps with prompts eagerly, results read when they are needed.

`launch` only queues work on the stream; the function that it returns waits for the sampled tokens. Rows whose
parameters need the host (penalties, log-probabilities, grammars) are drawn by `engine.sampler` from the logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.gpu.attention.choose import open_attention
from engine.gpu.config import GpuConfig
from engine.gpu.draw import DeviceSampler, is_drawn_on_device
from engine.gpu.forward import FusedForward, GpuInputs
from engine.gpu.graphs import LENGTH, POSITION, SLOT, DecodeGraphs, decode_step
from engine.gpu.inputs import step_tokens, upload
from engine.gpu.progress import check_alive, mark
from engine.gpu.rows import RowTable, bucket_sizes
from engine.gpu.state import DeviceState
from engine.gpu.swap import HostCopies
from engine.loader import LoadedModel
from engine.logits import changes_logits
from engine.logprobs import prompt_logprobs, wants_prompt_logprobs
from engine.request import Request, RequestId, SamplingParams, ScheduledRow, StepPlan, StepResult
from engine.sampler import LogitsHook, Sampler
from kvstore.types import BlockId

logger = logging.getLogger(__name__)
NUM_BUFFERS = 3  # pinned staging buffers: one being filled, two steps in flight


@dataclass(slots=True)
class _Staging:
    """Pinned host memory of one step, and the event after which it may be used again."""

    packed: Tensor  # int32 (3, max_rows)
    tokens: Tensor  # int64 (max_rows,)


class GpuRunner:
    """One model over one KV pool on one GPU (or, for tests, on a CPU through Triton's interpreter)."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_pool: Tensor,
        host_buffer: Tensor | None,
        config: EngineConfig,
        gpu: GpuConfig,
        max_model_len: int,
    ) -> None:
        self.hooks: dict[RequestId, LogitsHook] = {}
        self._device = loaded.device
        self._pool = kv_pool
        self._copies = None if host_buffer is None else HostCopies(kv_pool, host_buffer)
        self._block_size = config.block_size
        self._max_rows = config.max_num_seqs
        self._max_tokens = config.max_num_batched_tokens
        self._use_graphs = gpu.use_cuda_graph and loaded.device.type == "cuda"
        self._buckets = bucket_sizes(self._max_rows)
        self._rows = RowTable(self._max_rows, self._buckets)
        max_blocks = -(-max_model_len // config.block_size)
        self._state = DeviceState(self._max_rows, max_blocks, loaded.device)
        attention = open_attention(
            gpu.attention_backend, kv_pool, loaded.config.num_heads, loaded.dtype, self._max_tokens
        )
        self._forward = FusedForward(loaded.model, kv_pool, self._max_rows, attention)
        self._packed = torch.zeros(3, self._max_rows, dtype=torch.int32, device=loaded.device)
        pin = loaded.device.type == "cuda"
        self._staging = [
            _Staging(
                torch.zeros(3, self._max_rows, dtype=torch.int32, pin_memory=pin),
                torch.zeros(self._max_rows, dtype=torch.int64, pin_memory=pin),
            )
            for _ in range(NUM_BUFFERS)
        ]
        self._turn = 0
        self._sampler = Sampler()
        self._device_sampler = DeviceSampler(self._max_rows, loaded.config.vocab_size, loaded.device)
        self._graphs: DecodeGraphs | None = None

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See OverlappedRunner."""
        if not (plan.copies_out or plan.copies_in):
            return self._launch_rows(plan.rows)
        assert self._copies is not None, "a plan copies to host slots that do not exist"
        wait_out, wait_in = self._copies.out(plan.copies_out), self._copies.into(plan.copies_in)
        try:
            result = self._launch_rows(plan.rows)
        except Exception:  # the caller runs the rows again, but not the copies: they must have ended
            wait_out()
            wait_in()
            raise

        def wait() -> StepResult:
            wait_out()  # slots are given to others when the step's result is known
            wait_in()
            return result()

        return wait

    def _launch_rows(self, rows: Sequence[ScheduledRow]) -> Callable[[], StepResult]:
        result = StepResult([[] for _ in rows], [[] for _ in rows], [[] for _ in rows])
        if not rows:
            return lambda: result
        try:
            return self._queue_rows(rows, result)
        except Exception:
            self._rows.clear()  # the device may have some of what belongs to them and lack the rest
            check_alive(self._device)
            raise

    def _queue_rows(self, rows: Sequence[ScheduledRow], result: StepResult) -> Callable[[], StepResult]:
        self._turn = (self._turn + 1) % NUM_BUFFERS
        requests = [row.request for row in rows]
        changes = self._rows.sync(requests)
        self._state.apply(changes)
        self._device_sampler.apply(changes)
        places = [self._rows.row_of(request) for request in requests]
        self._state.upload_blocks(places, requests)
        if all(row.samples and row.num_new_tokens == 1 for row in rows):
            return self._launch_decode(rows, places, result)
        return self._launch_mixed(rows, places, result)

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        """See OverlappedRunner: whatever reads a request's own tokens on the host."""
        return bool(self.hooks) or any(
            row.samples and row.request.num_pending_tokens > 1 and changes_logits(row.request.params)
            for row in plan.rows
        )

    @torch.inference_mode()
    def warmup(self) -> None:
        """Compile kernels with one prompt, then capture the decode graphs. Uses the pool's first blocks."""
        pool_tokens = self._pool.shape[0] * self._block_size
        num_tokens = min(self._max_tokens, pool_tokens, self._state.block_tables.shape[1] * self._block_size) - 1
        request = Request(RequestId("warmup"), [0] * num_tokens, SamplingParams(max_tokens=1, temperature=0.0))
        request.block_ids = [BlockId(index) for index in range(-(-num_tokens // self._block_size))]
        self.run(StepPlan([ScheduledRow(request, 0, num_tokens, True)]))
        if self._use_graphs:
            self._graphs = DecodeGraphs(self._forward, self._state, self._device_sampler, self._packed, self._buckets)

    # -- steps -----------------------------------------------------------------------------------------------

    def _launch_decode(
        self, rows: Sequence[ScheduledRow], places: Sequence[int], result: StepResult
    ) -> Callable[[], StepResult]:
        num_rows = self._rows.bucket()
        staging = self._staging[self._turn]
        packed = staging.packed.numpy()
        packed[SLOT, :num_rows] = -1
        packed[LENGTH, :num_rows] = 0
        starts = [row.start for row in rows]
        packed[POSITION, places] = starts
        packed[LENGTH, places] = [start + 1 for start in starts]
        packed[SLOT, places] = self._slots(rows)
        self._packed[:, :num_rows].copy_(staging.packed[:, :num_rows], non_blocking=True)
        if self._graphs is not None:
            output = self._graphs.replay(num_rows)
        else:
            output = decode_step(self._forward, self._state, self._device_sampler, self._packed, num_rows)
        if all(is_drawn_on_device(row.request.params) for row in rows) and not self.hooks:
            return self._read_later(output.token_ids, places, list(range(len(rows))), result)
        logits = output.logits[upload(places, torch.int64, self._device)]
        return self._draw(logits, rows, places, list(range(len(rows))), result)

    def _launch_mixed(
        self, rows: Sequence[ScheduledRow], places: Sequence[int], result: StepResult
    ) -> Callable[[], StepResult]:
        decodes = [i for i, row in enumerate(rows) if row.samples and row.num_new_tokens == 1]
        chunks = [i for i, row in enumerate(rows) if not (row.samples and row.num_new_tokens == 1)]
        inputs, last_of = self._mixed_inputs(rows, places, decodes, chunks)
        hidden = self._forward.hidden(inputs)
        self._add_prompt_logprobs(rows, chunks, last_of, hidden, result)
        sampling = [i for i in decodes + chunks if rows[i].samples]
        if not sampling:
            wait_for_step = mark(self._device)

            def wait() -> StepResult:
                wait_for_step()  # else the host would queue chunk after chunk, and measure no time
                return result

            return wait
        logits = self._forward.logits(hidden[upload([last_of[i] for i in sampling], torch.int64, self._device)])
        chosen, own = [rows[i] for i in sampling], [places[i] for i in sampling]
        if not all(is_drawn_on_device(row.request.params) for row in chosen) or self.hooks:
            return self._draw(logits, chosen, own, sampling, result)
        index = upload(own, torch.int64, self._device)
        lengths = upload([row.start + row.num_new_tokens for row in chosen], torch.int64, self._device)
        token_ids = self._device_sampler.draw(logits, index, lengths)
        self._state.last_tokens[index] = token_ids.clamp(min=0)
        return self._read_later(token_ids, range(len(sampling)), sampling, result)

    def _mixed_inputs(
        self, rows: Sequence[ScheduledRow], places: Sequence[int], decodes: Sequence[int], chunks: Sequence[int]
    ) -> tuple[GpuInputs, dict[int, int]]:
        """Inputs of an eager step, and each row's last token's place in them."""
        device = self._device
        decode_rows, chunk_rows = [rows[i] for i in decodes], [rows[i] for i in chunks]
        query_starts = list(accumulate((row.num_new_tokens for row in chunk_rows), initial=0))
        num_tokens = len(decodes) + query_starts[-1]
        fields = upload(step_tokens(decode_rows, chunk_rows, self._block_size), torch.int32, device)
        token_ids, positions, slots = fields[:, :num_tokens]
        last_of = {i: place for place, i in enumerate(decodes)}
        last_of |= {i: len(decodes) + stop - 1 for i, stop in zip(chunks, query_starts[1:], strict=True)}
        seq_lens = [row.start + row.num_new_tokens for row in chunk_rows]
        index = upload([places[i] for i in (*decodes, *chunks)], torch.int64, device)
        own, others = index[: len(decodes)], index[len(decodes) :]
        ids = token_ids.long()
        ids[: len(decodes)] = self._state.last_tokens[own]
        inputs = GpuInputs(
            ids,
            positions,
            slots,
            self._state.block_tables[own],
            positions[: len(decodes)] + 1,
            self._forward.attention.plan(query_starts, seq_lens, self._state.block_tables[others]),
        )
        return inputs, last_of

    def _slots(self, rows: Sequence[ScheduledRow]) -> list[int]:
        size = self._block_size
        return [row.request.block_ids[row.start // size] * size + row.start % size for row in rows]

    # -- results ---------------------------------------------------------------------------------------------

    def _read_later(
        self, token_ids: Tensor, places: Sequence[int], indices: Sequence[int], result: StepResult
    ) -> Callable[[], StepResult]:
        """Copy the tokens behind the step; `token_ids[places[k]]` belongs to row `indices[k]` of the plan."""
        host = self._staging[self._turn].tokens
        host[: token_ids.shape[0]].copy_(token_ids, non_blocking=True)
        wait_for_copy = mark(self._device)

        def wait() -> StepResult:
            wait_for_copy()
            values = host.tolist()
            for place, index in zip(places, indices, strict=True):
                if values[place] < 0:
                    result.errors[index] = "the model's output is not finite"
                else:
                    result.token_ids[index].append(values[place])
            return result

        return wait

    def _draw(
        self, logits: Tensor, rows: Sequence[ScheduledRow], places: Sequence[int], indices: Sequence[int],
        result: StepResult,
    ) -> Callable[[], StepResult]:  # fmt: skip
        """Let the sampler choose, and put its tokens where the next step finds them."""
        drawn = self._sampler.sample(logits, rows, self.hooks)
        tokens = torch.tensor([max(token_id, 0) for token_id in drawn.token_ids], device=self._device)
        self._state.last_tokens[torch.tensor(places, device=self._device)] = tokens
        for place, index in enumerate(indices):
            if place in drawn.errors:
                result.errors[index] = drawn.errors[place]
                continue
            result.token_ids[index].append(drawn.token_ids[place])
            entry = drawn.logprobs[place]
            if entry is not None:
                result.logprobs[index].append(entry)
        return lambda: result

    def _add_prompt_logprobs(
        self, rows: Sequence[ScheduledRow], chunks: Sequence[int], last_of: dict[int, int], hidden: Tensor,
        result: StepResult,
    ) -> None:  # fmt: skip
        for index in chunks:
            row = rows[index]
            if wants_prompt_logprobs(row):
                end = last_of[index] + 1
                own = hidden[end - row.num_new_tokens : end]
                result.prompt_logprobs[index] = prompt_logprobs(row, own, self._forward.logits)
