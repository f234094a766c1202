"""The overview dashboard: is it up, is it fast, who does what. The first look after a page."""

from __future__ import annotations

from monitoring.dashboards.board import FIRING, Section, board
from monitoring.dashboards.panels import QUANTILES, Column, figure, heat, lines, rows
from monitoring.dashboards.queries import (
    ONE_WORKER,
    mean,
    quantile,
    rate,
    ratio,
    seen,
    series,
    total,
    uptime,
)
from monitoring.dashboards.queries import heat as buckets

ENDED, REFUSED = "vllm:request_success", "mini_infer_requests_refused"
TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
E2E = "vllm:e2e_request_latency_seconds"
ERRORS = 'finished_reason="error"'


def quantiles(metric: str) -> dict[str, str]:
    return {name: quantile(share, metric) for name, share in QUANTILES.items()}


def workers_ready(role: str) -> str:
    ready = seen("mini_infer_workers", "namespace, model_name", f'role="{role}", state="ready"')
    return f"sum({ready})"


def now() -> Section:
    return "Now", [
        figure("Firing alerts", "Alerts of this project that fire now; docs/operating.md has a paragraph on each.",
               "short", f"count({FIRING}) or vector(0)", steps=[(1, "red")]),
        figure("Decode workers", "Decode workers in service. At 0 no request can be answered.",
               "short", workers_ready("decode"), steps=[(1, "green")], base="red"),
        figure("Prefill workers", "Prefill workers in service. At 0 decode workers compute prompts, too.",
               "short", workers_ready("prefill")),
        figure("Ended per second", "Choices that ended, whatever the reason.", "reqps", rate(ENDED)),
        figure("Failed", "Share of choices that ended in an error.", "percentunit",
               f"{rate(ENDED, matchers=ERRORS)} / {rate(ENDED)}", steps=[(0.001, "orange"), (0.05, "red")]),
        figure("First token, p99", "99th percentile of the time from arrival to the first token.", "s",
               quantile(0.99, TTFT), steps=[(2, "orange"), (5, "red")]),
        figure("Between tokens, p99", "99th percentile of the time between two outputs of a choice.", "s",
               quantile(0.99, ITL), steps=[(0.1, "orange"), (0.25, "red")]),
        figure("KV in use", "Share of KV blocks in use on the fullest worker. Near 1, requests are preempted.",
               "percentunit", f"max({series('vllm:kv_cache_usage_perc')})", steps=[(0.8, "orange"), (0.95, "red")]),
    ]  # fmt: skip


def requests() -> Section:
    return "Requests", [
        lines("Time to first token", "Arrival at the router to the first token: queue, prompt and hand-off.", "s",
              quantiles(TTFT), steps=[(5, "red")]),
        lines("Time between tokens", "Between two outputs of one choice, as the router sees them.", "s",
              quantiles(ITL)),
        lines("End-to-end latency", "Arrival to end. Grows with the length of answers.", "s", quantiles(E2E)),
        lines("Tokens per second", "Prompt tokens, when their first token comes, and tokens generated.", "short",
              {"prompt": rate("vllm:prompt_tokens"), "generated": rate("vllm:generation_tokens")}),
        lines("Ended and refused per second", "Choices by finish reason, and requests refused by HTTP status: 429 is "
              "a full queue, 503 no worker.", "reqps",
              {"{{finished_reason}}": rate(ENDED, "finished_reason"), "{{status}}": rate(REFUSED, "status")}),
        lines("Open choices", "Before their first token (waiting) and after it (running).", "short",
              {"{{state}}": total("mini_infer_open_choices", "state")}, stacked=True),
        lines("Where the time goes", "Means per choice: in a worker's queue, computing the prompt, generating. "
              "Prompt and generation are the inference time.", "s",
              {"queue": mean("vllm:request_queue_time_seconds"), "prompt": mean("vllm:request_prefill_time_seconds"),
               "generation": mean("vllm:request_decode_time_seconds"),
               "inference": mean("vllm:request_inference_time_seconds")}),
        lines("Time per token after the first", "Mean of each choice, then quantiles over choices.", "s",
              quantiles("vllm:request_time_per_output_token_seconds")),
        lines("Longest choice of a request", "With n > 1 a request is as long as its longest choice.", "short",
              quantiles("vllm:request_max_num_generation_tokens")),
        heat("Times to first token", "How many first tokens came after which time.", "s", buckets(TTFT)),
        heat("Prompt lengths", "Prompts by their number of tokens.", "short", buckets("vllm:request_prompt_tokens")),
        heat("Output lengths", "Choices by the number of tokens generated.", "short",
             buckets("vllm:request_generation_tokens")),
    ]  # fmt: skip


def cluster() -> Section:
    return "Cluster", [
        rows("Workers", "Each worker by its own account. A short uptime is a restart; versions should be equal.", [
            Column("up for", uptime(f"{ONE_WORKER}, version"), "s"),
            Column("running", total("vllm:num_requests_running", ONE_WORKER)),
            Column("waiting", total("vllm:num_requests_waiting", ONE_WORKER), steps=[(16, "orange"), (128, "red")]),
            Column("KV in use", total("vllm:kv_cache_usage_perc", ONE_WORKER), "percentunit",
                   [(0.8, "orange"), (0.95, "red")]),
            Column("tokens/s", rate("mini_infer_step_tokens", ONE_WORKER)),
            Column("prefix hits", ratio("vllm:prefix_cache_hits", "vllm:prefix_cache_queries", ONE_WORKER),
                   "percentunit"),
            Column("draining", total("mini_infer_draining", ONE_WORKER), steps=[(1, "orange")]),
        ]),
        lines("Workers by state", "As routers see them, the highest count of any router.", "short",
              {"{{role}} {{state}}": seen("mini_infer_workers", "role, state") + " > 0"}),
        lines("Waiting by role", "On prefill workers prompts wait, on decode workers streams.", "short",
              {"{{role}}": total("vllm:num_requests_waiting", "role")}, stacked=True),
        lines("Placements per second", "Where prompts are computed: by a prefill worker for a decode worker, all on "
              "a decode worker, or kept by the prefill worker.", "reqps",
              {"{{placement}}": rate("mini_infer_placements", "placement")}, stacked=True),
        lines("Migrations and moves per second", "Migrations: choices whose worker failed. Moves: by the policy.",
              "reqps", {"migrations": rate("mini_infer_migrations"), "moves": rate("mini_infer_moves")}),
        lines("Prefix index: regret", "Share of prompt tokens that the router expected in a cache and that were not "
              "there.", "percentunit",
              {"regret": ratio("mini_infer_index_regret_tokens", "mini_infer_index_expected_tokens")},
              steps=[(0.2, "red")]),
        lines("Prefix index: size", "Block keys that a router knows, and workers by the state of their part.",
              "short", {"{{model_name}} keys": seen("mini_infer_index_blocks", "model_name"),
               "workers {{state}}": seen("mini_infer_index_workers", "state")}),
    ]  # fmt: skip


def dashboard() -> str:
    return board(
        "mini-infer", "mini-infer", "Overview of a cluster: service, latency, load.", [now(), requests(), cluster()]
    )
