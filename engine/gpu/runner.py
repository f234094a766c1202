"""Executes step plans on a GPU: decode steps as CUDA graphs, steps with prompts eagerly.

`launch` only queues work on the stream; the returned step waits for the sampled tokens when its result is asked for.
`steps/samples.py` samples tokens from logits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.wings import call_wing, has_wing
from engine.config import EngineConfig, GpuConfig
from engine.gpu.forward import FusedForward
from engine.gpu.lowering import Observer, narrowed_rows
from engine.gpu.ops.rules import SINGLE_GPU, GpuSeams
from engine.gpu.pinning import upload
from engine.gpu.steps.decode_steps import DecodeSteps
from engine.gpu.steps.inputs import mixed_inputs
from engine.gpu.steps.rows import MAX_GRAPH_TOKENS, DeviceState, RowTable
from engine.gpu.steps.samples import StepSamples
from engine.gpu.steps.step import DeviceTimer, GpuBatch, GpuStep, check_alive, mark
from engine.kv.memory import kv_layout
from engine.loader.load import LoadedModel
from engine.plan import PendingStep, ScheduledRow, StepPlan, StepResult
from engine.ranks import RankContext
from engine.request_states import RequestState
from engine.runner import ModelRunner, reads_hidden
from engine.trial_plans import warmup_plans
from engine.wings import OnProgress, no_progress

if TYPE_CHECKING:
    from engine.prompt_graphs.graphs import PromptGraphs

NUM_BUFFERS = 3  # of pinned staging memory: one being filled, two steps in flight


class GpuRunner(ModelRunner):
    """One model over one KV pool on one GPU (or, for tests, on a CPU through Triton's interpreter)."""

    least_buffers = NUM_BUFFERS
    copies_beside_steps = True

    def __init__(
        self,
        loaded: LoadedModel,
        kv_pool: Tensor,
        host_buffer: Tensor | None,
        config: EngineConfig,
        gpu: GpuConfig,
        max_model_len: int,
        ranks: RankContext[GpuSeams] = SINGLE_GPU,
    ) -> None:
        super().__init__(loaded, kv_pool, host_buffer, ranks)
        model_config = loaded.model.config  # of this rank's shard
        self._is_stage = config.pp > 1  # where one step is in flight of each request: its last token is known
        self.max_steps_in_flight = 2 if gpu.overlap and not self._is_stage else 1
        self._device = loaded.device
        self._queries_per_kv_head = model_config.num_heads // model_config.num_kv_heads
        self._block_size = config.block_size
        self._max_rows = config.max_num_seqs
        self._max_tokens = config.max_num_batched_tokens
        self._use_graphs = gpu.use_cuda_graph and loaded.device.type == "cuda"
        self._rows = RowTable(self._max_rows, keeps=config.pp > 1)
        max_blocks = -(-max_model_len // config.block_size)
        layout = kv_layout(model_config, kv_pool.dtype)
        self._num_groups = len(layout.groups)
        self._state = DeviceState(self._max_rows, max_blocks, loaded.device, self._num_groups)
        self._forward = FusedForward(
            loaded.model, kv_pool, self._max_rows, gpu.attention_backend, loaded.dtype, self._max_tokens, ranks
        )
        if config.num_ranks == 1:
            path = "engine.persistent.decoder:open_decoder"
            self._forward.row_decoder = call_wing(path, loaded.model, kv_pool, config)
        self.attention_backend = self._forward.attention.name
        self._num_buffers = max(self.least_buffers, config.pp + 1)
        self._turns = cycle(range(self._num_buffers))
        of_vocab = 1 if ranks.passes_on else loaded.config.vocab_size  # nothing is kept where another stage samples
        self._samples = StepSamples(self._state, self._max_rows, of_vocab, self._num_buffers, ranks.seams.vocabulary)
        self.device_rows = self._rows, self._samples
        self._has_drafts = config.has_drafts
        self._decodes = self._open_decodes(self._forward)
        self.prompt_graphs: PromptGraphs | None = None  # without them steps with prompts run eagerly

    def _open_decodes(self, forward: FusedForward) -> DecodeSteps:
        own = forward, *self.device_rows, self._num_buffers, self._block_size
        if self._is_stage:
            from engine.pipeline_parallel.gpu_steps import StageSteps

            return StageSteps(self._ranks, self._has_drafts, *own)
        if self._has_drafts:
            from engine.query_steps.steps import DraftSteps

            return DraftSteps(*own)
        return DecodeSteps(*own)

    def observe_with(self, observer: Observer) -> None:
        """Let `observer` see all steps, before graphs are captured. Tokens after a prompt are not drafted then."""
        self._forward.observe_with(observer)

    def _launch(self, plan: StepPlan, requests: Sequence[RequestState]) -> PendingStep:
        self._rows.forget(plan.finished)
        waits = self._copy(plan)
        try:
            step = self._launch_rows(plan.rows, requests)
        except Exception:  # the caller runs the rows again, but not the copies: they must have ended
            for wait in waits:
                wait()
            raise
        step.waits += waits  # slots are given to others when the step's result is known
        return step

    def _launch_rows(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> GpuStep:
        step = GpuStep(StepResult.of_rows(len(rows)), self._proposer)
        if rows:
            try:
                self._queue_rows(rows, requests, step)
            except Exception:  # any: the state of these rows on the device may be incomplete
                self._rows.clear()
                check_alive(self._device)
                raise
        return step

    def _queue_rows(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState], step: GpuStep) -> None:
        step.turn = next(self._turns)
        changes = self._rows.sync(requests)
        self._state.apply(changes)
        if not self._ranks.passes_on:
            self._samples.apply(changes)
        batch = GpuBatch(rows, requests, [self._rows.row_of(request) for request in requests])
        self._state.upload_blocks(batch.device_rows, requests)
        self._ranks.inbox.receive(rows)
        if all(row.samples and row.is_decode for row in rows) and not any(each.params.pooling for each in requests):
            self._queue_decode(batch, step)
        else:  # timed by the device: the host, busy with the launch, would see the previous step end late
            step.timer = DeviceTimer() if self._device.type == "cuda" else None
            graphs = self._graphs_of_prompts()
            if graphs is not None and graphs.takes(batch):
                self._queue_prompts(batch, graphs, step)
            else:
                self._queue_mixed(batch, step)
            if step.timer is not None:
                step.timer.stop()

    @torch.inference_mode()
    def warmup(self, on_progress: OnProgress = no_progress) -> None:
        """Compile kernels with a few steps, then capture graphs. Uses the pool's first blocks.

        A kernel that is compiled later stalls all streams: docs/kernels.md says how that is avoided.
        """
        on_progress("warming up", None)
        # An earlier engine of this process may log what is compiled.
        with call_wing("engine.late_compiles.log:compiles_are_early") or nullcontext():
            self._run_warmup_plans()
            if self._copies is not None:
                self._copies.warm_up()
            if self._use_graphs:
                self.capture(on_progress)
        call_wing("engine.late_compiles.log:log_late_compiles")

    def _run_warmup_plans(self) -> None:
        num_positions = min(self._pool.shape[0] // self._num_groups, self._state.block_tables[0].shape[1])
        max_length = num_positions * self._block_size
        sampled = list({narrowed_rows(n): n for n in range(1, self._max_rows + 1)}.values())
        for plan in warmup_plans(
            MAX_GRAPH_TOKENS, self._max_tokens, sampled, max_length, self._block_size, self._num_groups
        ):  # fmt: skip
            self.launch(plan).result()
            self._requests.clear()
            self._rows.clear()

    @torch.inference_mode()
    def capture(self, on_progress: OnProgress = no_progress) -> None:
        """Capture graphs of decode steps and of steps with short prompts, without other pipeline stages."""
        with collector_paused():
            self._decodes.capture(on_progress)
            if has_wing("engine.prompt_graphs"):
                self.prompt_graphs = self.open_prompt_graphs()

    def open_prompt_graphs(self, captures: bool = True) -> PromptGraphs:
        from engine.prompt_graphs.graphs import PromptGraphs

        own = self._forward, self._state, self._samples, self._ranks
        sizes = self._block_size, self._queries_per_kv_head, self._num_buffers, self._max_tokens
        return PromptGraphs(*own, *sizes, captures)

    # -- steps -----------------------------------------------------------------------------------------------

    def _queue_decode(self, batch: GpuBatch, step: GpuStep) -> None:
        self._decodes.queue(batch, step)

    def _graphs_of_prompts(self) -> PromptGraphs | None:
        """Return the graphs that may run the step that is queued."""
        return self.prompt_graphs

    def _queue_prompts(self, batch: GpuBatch, graphs: PromptGraphs, step: GpuStep) -> None:
        graphs.queue(batch, step)

    def _queue_mixed(self, batch: GpuBatch, step: GpuStep) -> None:
        rows = batch.rows
        decodes, chunks = split_rows(rows)
        inputs, last_of = mixed_inputs(batch, decodes, chunks, self._state, self._forward.attention, self._block_size)
        sampling = [i for i in decodes + chunks if rows[i].samples]
        padding = [0] * (narrowed_rows(len(sampling)) - len(sampling))
        last = upload([last_of[i] for i in sampling] + padding, torch.int64, self._device)
        pairs = zip(rows, batch.requests, strict=True)
        wants_all = self._ranks.passes_on or any(reads_hidden(row, request) for row, request in pairs)
        inputs.wanted = None if wants_all else last
        hidden = self._forward.hidden(inputs)
        if self._ranks.pass_on(hidden):
            return
        if wants_all:
            self._read_hidden(rows, batch.requests, hidden, lambda i: last_of[i] + 1, self._logits, step.found)
        last = last[: len(sampling)]
        if not sampling:
            self._forward.observe(inputs, last, last)
            step.waits.append(mark(self._device))  # else the host would queue chunk after chunk and measure no time
            return
        own = hidden[last] if wants_all else hidden[: len(sampling)]
        logits = self._forward.logits(own if wants_all else hidden)[: len(sampling)]
        token_ids = self._samples.sample(logits, batch, sampling, step)
        self._forward.observe(inputs, token_ids, last)
        step.takes_drafts = not self._forward.is_observed

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the whole vocabulary."""
        logits: Tensor = self._ranks.seams.vocabulary.gathered(self._forward.logits(hidden))
        return logits


def split_rows(rows: Sequence[ScheduledRow]) -> tuple[list[int], list[int]]:
    """Return the indices of decode rows and of prompt rows, in the order of an eager step's tokens."""
    decodes = [i for i, row in enumerate(rows) if row.samples and row.num_tokens == 1]
    chunks = [i for i, row in enumerate(rows) if not (row.samples and row.num_tokens == 1)]
    return decodes, chunks


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect garbage now and not inside: destroying an earlier engine's graph would break a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
