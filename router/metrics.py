"""The router's metrics of one model: observed per step or per request, or read from its workers on a scrape."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Collection

from common.metrics import MetricSet, export_start_time
from kvstore.pool.index import IndexState
from router.config import ROLES
from router.journal import Journal
from router.workers.model_workers import ModelWorkers

FINISHED_REASONS = ("stop", "length", "abort", "refused", "error")
WORKER_STATES = ("ready", "connecting", "draining", "refused", "not_serving", "suspended")
REFUSED_STATUSES = (400, 401, 404, 405, 408, 413, 415, 429, 431, 500, 503, 504)
PLACEMENTS = ("disaggregated", "local", "kept")


class RouterMetrics:
    """Metrics of one model. Labels are looked up once, so an observation is one call."""

    def __init__(self, model_name: str, shares: RouterMetrics | None = None) -> None:
        """model_name: the model's own name, which its workers' metrics have, too.

        shares: the metrics of another model, which are rendered together with these.
        """
        metrics = MetricSet({"model_name": model_name}, shares._set if shares else None)
        if shares is None:
            export_start_time(MetricSet({"role": "router"}, metrics))
        self._set: MetricSet = metrics
        self.time_to_first_token = metrics.histogram("vllm:time_to_first_token_seconds")
        self.inter_token_latency = metrics.step_histogram("vllm:inter_token_latency_seconds")
        self.prompt_tokens = metrics.counter("vllm:prompt_tokens")
        self.longest_output = metrics.histogram("vllm:request_max_num_generation_tokens")  # per request
        self.migrations = metrics.counter("mini_infer_migrations")
        self.moves = metrics.counter("mini_infer_moves")
        self.placements = {kind: metrics.counter("mini_infer_placements", placement=kind) for kind in PLACEMENTS}
        self.expected_tokens = metrics.counter("mini_infer_index_expected_tokens")
        self.regret_tokens = metrics.counter("mini_infer_index_regret_tokens")
        self._generation_tokens = metrics.counter("vllm:generation_tokens")
        self._num_tokens_of_ended = self._num_tokens_shown = 0
        self._e2e = metrics.histogram("vllm:e2e_request_latency_seconds")
        self._per_token = metrics.histogram("vllm:request_time_per_output_token_seconds")
        self._queue_time = metrics.histogram("vllm:request_queue_time_seconds")
        self._prefill_time = metrics.histogram("vllm:request_prefill_time_seconds")
        self._decode_time = metrics.histogram("vllm:request_decode_time_seconds")
        self._inference_time = metrics.histogram("vllm:request_inference_time_seconds")
        self._prompt_length = metrics.histogram("vllm:request_prompt_tokens")
        self._output_length = metrics.histogram("vllm:request_generation_tokens")
        self._ended = {r: metrics.counter("vllm:request_success", finished_reason=r) for r in FINISHED_REASONS}
        for status in REFUSED_STATUSES:  # exports 0, so that a rate includes the first refusal
            metrics.counter("mini_infer_requests_refused", status=str(status))

    def choice_ended(self, journal: Journal, now: float) -> None:
        """Observe everything that is known only at the end of a choice."""
        num_output = len(journal.output_token_ids)
        self._ended[journal.outcome].inc()
        if journal.outcome == "refused":
            return  # it took no time: latencies would look better under overload
        self._num_tokens_of_ended += num_output
        self._prompt_length.observe(len(journal.prompt_token_ids))
        self._output_length.observe(num_output)
        self._e2e.observe(now - journal.arrival)
        decode_seconds = journal.last_token_time - journal.first_token_time
        if num_output > 1:
            self._decode_time.observe(decode_seconds)
            self._per_token.observe(decode_seconds / (num_output - 1))
        if (times := journal.first_times) is not None:
            self._queue_time.observe(times.queue_seconds)
            self._prefill_time.observe(times.prefill_seconds)
            self._inference_time.observe(times.prefill_seconds + decode_seconds)

    def refused(self, status: int) -> None:
        """Count a request that is answered with an error before it becomes a choice."""
        self._set.counter("mini_infer_requests_refused", status=str(status)).inc()

    def render(self) -> bytes:
        """Return the text for a scrape, with all models that share metrics."""
        return self._set.render()

    def read(self, workers: ModelWorkers, open_choices: Collection[Journal]) -> None:
        """Update, before a scrape, the metrics that are not observed as they change."""
        self._read_choices(open_choices)
        now = time.monotonic()
        states = Tally((link.role, link.state(now)) for link in workers.links)
        for role in ROLES:
            for state in WORKER_STATES:
                self._set.gauge("mini_infer_workers", role=role, state=state).set(states[(role, state)])
        self._set.gauge("mini_infer_index_blocks").set(workers.index.num_keys)
        by_state = Tally(workers.index.state(link.worker_id) for link in workers.links if link.info)
        for state_of_index in IndexState:
            gauge = self._set.gauge("mini_infer_index_workers", state=state_of_index.value)
            gauge.set(by_state[state_of_index])

    def _read_choices(self, open_choices: Collection[Journal]) -> None:
        """Count open choices and their tokens, as tokens of long answers counted at the end would be a spike."""
        num_running = sum(journal.has_started for journal in open_choices)
        self._set.gauge("mini_infer_open_choices", state="running").set(num_running)
        self._set.gauge("mini_infer_open_choices", state="waiting").set(len(open_choices) - num_running)
        num_tokens = self._num_tokens_of_ended + sum(len(journal.output_token_ids) for journal in open_choices)
        self._generation_tokens.inc(num_tokens - self._num_tokens_shown)
        self._num_tokens_shown = num_tokens
