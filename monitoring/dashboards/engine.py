"""The engine dashboard: steps, batches, queues, preemption, speculation."""

from __future__ import annotations

from monitoring.dashboards.board import Section, board
from monitoring.dashboards.panels import Column, figure, heat, lines, rows
from monitoring.dashboards.queries import (
    ONE_WORKER,
    START,
    WORKER,
    quantile,
    rate,
    ratio,
    series,
    total,
    uptime,
)
from monitoring.dashboards.queries import heat as buckets

RUNNING, WAITING, SWAPPED = (f"vllm:num_requests_{state}" for state in ("running", "waiting", "swapped"))
RATIO = "mini_infer_step_seconds_over_predicted"
STEP, STEP_TOKENS, TOKENS = "mini_infer_step_seconds", "vllm:iteration_tokens_total", "mini_infer_step_tokens"
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
DRAFTED_ROWS, ACCEPTED_AT = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"
BALANCEDNESS, EXPERT_TOKENS = "mini_infer_expert_balancedness", "mini_infer_expert_tokens"
PLACEMENTS = "mini_infer_expert_placements"
HITS, QUERIES = "vllm:prefix_cache_hits", "vllm:prefix_cache_queries"


def now() -> Section:
    return "Now", [
        figure("Running", "Requests that take part in steps.", "short", total(RUNNING)),
        figure("Waiting", "Requests that wait for their first step.", "short", total(WAITING),
               steps=[(128, "orange")]),
        figure("Swapped", "Requests whose KV had to go to host memory.", "short", total(SWAPPED),
               steps=[(1, "orange")]),
        figure("Preemptions per second", "Requests taken out of a batch for want of KV blocks.", "ops",
               rate("vllm:num_preemptions"), steps=[(0.01, "orange"), (0.1, "red")]),
        figure("Decode step, p99", "99th percentile of a step's duration on decode workers: what streams wait for.",
               "s", quantile(0.99, STEP, matchers='role="decode"'), steps=[(0.1, "orange"), (0.25, "red")]),
        figure("Tokens per second", "Of prompts and outputs, as steps compute them.", "short", rate(TOKENS)),
        figure("Drafts accepted", "Share of speculated tokens that were right. No data without speculation.",
               "percentunit", ratio(ACCEPTED, DRAFTED)),
        figure("Restarts", "Services that started within the range shown.", "short",
               f"sum(changes({START}{{{WORKER}}}[$__range]))", steps=[(1, "orange")]),
    ]  # fmt: skip


def steps() -> Section:
    return "Steps", [
        lines("Step duration", "Median and tail by role. On decode workers it is the time between tokens.", "s",
              {"{{role}} p50": quantile(0.5, STEP, "role"), "{{role}} p99": quantile(0.99, STEP, "role")}),
        heat("Step durations", "How many steps took how long.", "s", buckets(STEP)),
        heat("Tokens in a step", "How many steps computed how many tokens: the size of batches.", "short",
             buckets(STEP_TOKENS)),
        lines("Tokens computed per second", "By phase and worker: prompts (prefill) and outputs (decode).", "short",
              {"{{worker}} {{phase}}": rate(TOKENS, "worker, phase")}, stacked=True),
        lines("Step duration over prediction", "Of steps with prompts and decode rows, under an ITL objective: "
              "far from 1, chunks of prompts are too long or too short.", "short",
              {"{{worker}} p50": quantile(0.5, RATIO, "worker"), "{{worker}} p99": quantile(0.99, RATIO, "worker")}),
        lines("Drafts accepted by position", "Share of rows with drafts whose draft there was right. No data without "
              "speculation.", "percentunit",
              {"position {{position}}": f"{rate(ACCEPTED_AT, 'position')} / ignoring(position) group_left() "
                                        f"{rate(DRAFTED_ROWS)}"}),
        lines("Balancedness of experts", "Tokens of the mean rank over those of the one with the most: 1 is best, "
              "0 where experts are not counted.", "percentunit", {"{{worker}}": series(BALANCEDNESS)}),
        lines("Tokens of experts per second", "By worker and the rank that has the expert: each choice of an expert "
              "by a token.", "short", {"{{worker}} rank {{rank}}": rate(EXPERT_TOKENS, "worker, rank")}),
        lines("Layers placed anew per second", "By worker: ranks exchange experts of a layer before a step, which "
              "waits.", "ops", {"{{worker}}": rate(PLACEMENTS, "worker")}),
        lines("Steps per second", "An engine without work makes none.", "ops",
              {"{{worker}}": f"sum by (worker) (rate({STEP}_count{{{WORKER}}}[$__rate_interval]))"}),
    ]  # fmt: skip


def queues() -> Section:
    return "Queues and memory", [
        lines("Running requests", "By worker.", "short", {"{{worker}}": series(RUNNING)}),
        lines("Waiting requests", "By worker, before their first step.", "short", {"{{worker}}": series(WAITING)}),
        lines("Swapped requests", "By worker; their KV lies in host memory.", "short",
              {"{{worker}}": series(SWAPPED)}),
        lines("Preemptions per second", "By worker. Requests lose their place, and some their KV.", "ops",
              {"{{worker}}": rate("vllm:num_preemptions", "worker")}, steps=[(0.1, "red")]),
        lines("KV in use", "Share of KV blocks that requests or leases hold.", "percentunit",
              {"{{worker}}": series("vllm:kv_cache_usage_perc")}, steps=[(0.95, "red")]),
        lines("Prefix cache hits", "Share of prompt tokens found, by worker.", "percentunit",
              {"{{worker}}": ratio(HITS, QUERIES, "worker")}),
        lines("Speculation", "Draft tokens per second: proposed and accepted.", "short",
              {"proposed": rate(DRAFTED), "accepted": rate(ACCEPTED)}),
        lines("Draining workers", "1 while a worker takes no new requests.", "short",
              {"{{worker}}": series("mini_infer_draining")}),
        lines("Uptime", "Falls to 0 where a worker starts again.", "s",
              {"{{worker}}": uptime(ONE_WORKER)}),
        rows("Engines", "Each worker now.", [
            Column("running", total(RUNNING, ONE_WORKER)),
            Column("waiting", total(WAITING, ONE_WORKER), steps=[(128, "orange")]),
            Column("swapped", total(SWAPPED, ONE_WORKER), steps=[(1, "orange")]),
            Column("step, p50", quantile(0.5, STEP, ONE_WORKER), "s"),
            Column("step, p99", quantile(0.99, STEP, ONE_WORKER), "s", [(0.1, "orange"), (0.25, "red")]),
            Column("tokens/s", rate(TOKENS, ONE_WORKER)),
            Column("preemptions/s", rate("vllm:num_preemptions", ONE_WORKER), "ops", [(0.1, "red")]),
        ]),
    ]  # fmt: skip


def dashboard() -> str:
    description = "Engines of all workers: steps, batches, queues, preemption, speculation."
    return board("mini-infer-engine", "mini-infer: engine", description, [now(), steps(), queues()])
