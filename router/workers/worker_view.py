"""What the policy sees of a worker: its last report, and what the router has given it since. Pure.

A report lacks what is on its way, so each size is the larger one of the report's and the router's own count.
"""

from __future__ import annotations

from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.routing.rates import WorkerRates
from router.routing.views import WorkerView
from router.workers.backlog import Backlog

KV_BOUND_SHARE = 0.9  # of the KV blocks in use while requests wait: the batch cannot grow


def worker_view(
    worker_id: WorkerId, role: str, max_num_seqs: int, load: pb.LoadReport, rates: WorkerRates, backlog: Backlog,
    num_legs: int, now: float,
) -> WorkerView:  # fmt: skip
    """`num_legs` are open on the worker."""
    arrived_tokens, arrived_pairs, num_arrived = rates.arrivals(now)
    num_decoding, context_tokens = (load.num_running, load.context_tokens) if role == "decode" else (0, 0)
    num_used = load.kv_blocks_total - load.kv_blocks_free - load.kv_blocks_cached
    kv_used_share = num_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
    is_kv_bound = kv_used_share > KV_BOUND_SHARE and load.num_waiting + load.num_swapped > 0
    return WorkerView(
        worker_id=worker_id,
        num_running=max(load.num_running, num_legs - load.num_waiting),
        num_waiting=load.num_waiting + load.num_loading + load.num_swapped + backlog.num_expected,
        num_rows=max(num_decoding, backlog.num_rows) + backlog.num_expected,
        context_tokens=max(context_tokens, backlog.context_tokens) + backlog.expected_tokens,
        queued_prefill_tokens=max(load.waiting_prefill_tokens, backlog.prompt_tokens),
        queued_prefill_pairs=max(load.waiting_prefill_pairs, backlog.prompt_pairs),
        max_num_seqs=max_num_seqs,
        num_slots=min(max(load.num_running, 1), max_num_seqs) if is_kv_bound else max_num_seqs,
        kv_used_share=kv_used_share,
        step=rates.step_times.cost,
        token_seconds=rates.token_seconds,
        pull_tokens_per_second=rates.pull_tokens_per_second,
        is_forgotten=not num_legs and rates.are_old(now),
        prompt_tokens_per_second=arrived_tokens,
        prompt_pairs_per_second=arrived_pairs,
        prompts_per_second=num_arrived,
    )
