"""Executes a plan: copies blocks, runs one forward pass over all rows, samples for the rows that reach their end.

Knows tensors, not queues: the scheduler has decided what runs and in which blocks. If a row's logits cannot be
sampled from, only that row fails; an exception of the forward pass itself propagates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.wings import call_wing
from engine.config import EngineConfig
from engine.cpu.batch import StepBatch, build_batch
from engine.cpu.forward import CpuForward, CpuForwards
from engine.cpu.pool_attention import PoolAttention
from engine.cpu.sampler import Sampler
from engine.kv.memory import kv_dtype, kv_layout
from engine.layers.attention import AttentionBackend, AttentionBlock
from engine.layers.block import Step
from engine.loader.load import LoadedModel
from engine.plan import CompletedStep, PendingStep, ScheduledRow, StepPlan, StepResult
from engine.ranks import SINGLE, RankContext, Seams
from engine.request_states import RequestState
from engine.runner import ModelRunner, Proposer, sampled_queries, settle
from engine.trial_plans import trial_plan
from engine.wings import OnProgress, no_progress
from kvstore.layout import PoolGeometry

MAX_WARMUP_TOKENS = 64  # 512 make the first prompt 10 to 80 ms faster, and a model of 0.5B ready 0.8 s later

BACKENDS = (  # of wings; the first one that supports the model and its pool is used
    "engine.bidirectional.attention:attention_for",
    "engine.windows.grouped_attention:attention_for",
    "engine.native.attention:attention_for",
    "engine.cpu_forms.aligned_pool:attention_for",
)


class CpuRunner(ModelRunner):
    """Runs one model over one KV pool. kv_pool: see PoolGeometry. host_buffer: see ModelRunner."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_pool: Tensor,
        host_buffer: Tensor | None,
        config: EngineConfig,
        ranks: RankContext[Seams] = SINGLE,
    ) -> None:
        super().__init__(loaded, kv_pool, host_buffer, ranks)
        config = config.resolved(loaded.device.type)
        dtype = kv_dtype(config, loaded.dtype)
        layout = kv_layout(loaded.config, dtype)
        geometry = PoolGeometry(layout, 1, config.block_size, loaded.fingerprint, loaded.shard)
        assert (kv_pool.shape[1:], kv_pool.dtype) == (geometry.block_shape, dtype), "the KV pool is another model's"
        self._model = loaded.model
        self._forwards = self._lower(loaded, config, ranks)
        self._device = loaded.device
        self._block_size = config.block_size
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._num_groups = len(layout.groups)
        self._backend = self._attention(loaded, kv_pool, geometry)
        self.attention_backend = self._backend.name
        self._sampler = Sampler()

    def _lower(self, loaded: LoadedModel, config: EngineConfig, ranks: RankContext[Seams]) -> CpuForwards:
        forwards: CpuForwards | None = call_wing("engine.cpu_forms.forms:forms_by_rows", loaded, config, ranks)
        return forwards or CpuForwards(loaded.model, ranks)

    def _attention(self, loaded: LoadedModel, kv_pool: Tensor, geometry: PoolGeometry) -> AttentionBackend:
        for path in BACKENDS:
            backend: AttentionBackend | None = call_wing(path, loaded, kv_pool, geometry)
            if backend is not None:
                return backend
        return PoolAttention(kv_pool, loaded.model.rotary)

    def propose_with(self, proposer: Proposer) -> None:
        """See ModelRunner. Raises ConfigError if the proposer cannot read its layers of this model."""
        super().propose_with(proposer)
        if proposer.layers:
            self._forwards.change(partial(proposer.watch, self._model))

    def sample_with(self, sampler: Sampler) -> None:
        """Sample with `sampler` from the next step on. A row's drafts are among its request's tokens then."""
        self._sampler = sampler

    def _launch(self, plan: StepPlan, requests: Sequence[RequestState]) -> PendingStep:
        self._copy(plan)
        rows = plan.rows
        result = StepResult.of_rows(len(rows))
        for indices in self._forwards.passes(rows, requests):
            part = self._run([rows[i] for i in indices], [requests[i] for i in indices])
            result.put(indices, part)
        return CompletedStep(result)

    def _run(self, rows: list[ScheduledRow], requests: list[RequestState]) -> StepResult:
        result = StepResult.of_rows(len(rows))
        batch = build_batch(rows, requests, self._block_size)
        inputs = torch.from_numpy(batch.inputs).to(self._device)
        attend = partial(self._attend, metadata=self._backend.plan(batch, inputs))
        forward = self._forwards.choose(batch)
        self._ranks.inbox.receive(rows)
        hidden = forward.hidden(Step(inputs[0], inputs[1], attend))
        if self._ranks.pass_on(hidden):
            return result
        self._proposer.observe(rows, requests)
        ends = batch.query_starts[1:]
        self._read_hidden(rows, requests, hidden, ends.__getitem__, forward.logits, result)
        self._add_samples(forward, batch, hidden, result)
        return result

    def _attend(self, block: AttentionBlock, qkv: Tensor, metadata: Any) -> Tensor:
        self._on_work()
        return self._backend.attend(block, qkv, metadata)

    def warmup(self, on_progress: OnProgress = no_progress) -> None:
        """Run a decode step and a prefill step, so that threads and caches are ready for the first request.

        Uses the pool's first blocks; call it before they hold anything.
        """
        pool_tokens = self._pool.shape[0] // self._num_groups * self._block_size
        num_positions = self._model.config.max_position_embeddings
        longest = min(self._max_num_batched_tokens, pool_tokens, num_positions, MAX_WARMUP_TOKENS)
        on_progress("warming up", None)
        for num_tokens in (1, longest):
            self.launch(trial_plan([(0, num_tokens)], self._block_size, num_groups=self._num_groups))
        self._requests.clear()

    def _add_samples(self, forward: CpuForward, batch: StepBatch, hidden: Tensor, result: StepResult) -> None:
        """Sample for each row that reaches its last known token: the next token, and the ones after its drafts."""
        sampling = [index for index, row in enumerate(batch.rows) if row.samples]
        if not sampling:
            return
        sampled = sampled_queries(batch.rows, batch.requests, sampling)
        token_indices: list[int] = []  # indices of the step's tokens after which one is sampled
        for index in sampling:
            row, end = batch.rows[index], batch.query_starts[index + 1]
            num_drafts = len(row.draft_token_ids)
            if num_drafts:  # for the sampler, which reads earlier tokens; the first sampled token replaces them
                batch.requests[index].token_ids[row.stop - num_drafts :] = row.draft_token_ids
            token_indices += range(end - 1 - num_drafts, end)
        if len(token_indices) != hidden.shape[0]:
            hidden = hidden[token_indices]
        requests, positions = [entry[2] for entry in sampled], [entry[3] for entry in sampled]
        tokens = self._sampler.sample(forward.logits(hidden), requests, positions)
        settle(result, sampled, tokens.token_ids, tokens.logprobs)
        self._proposer.propose(result, sampled)
