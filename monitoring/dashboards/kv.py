"""The KV dashboard: transfers between workers, blocks and leases, prefix caches, host memory."""

from __future__ import annotations

from monitoring.dashboards.board import Section, board
from monitoring.dashboards.panels import QUANTILES, Column, figure, heat, lines, rows
from monitoring.dashboards.queries import ONE_WORKER, quantile, rate, ratio, series, total
from monitoring.dashboards.queries import heat as buckets

PULLS, FAILURES = "mini_infer_kv_transfers", "mini_infer_kv_transfer_failures"
SECONDS, BYTES = "mini_infer_kv_transfer_seconds", "mini_infer_kv_transfer_bytes"
BLOCKS, SLOTS = "mini_infer_kv_blocks", "mini_infer_host_tier_slots"
HITS, QUERIES, HOST_HITS = "vllm:prefix_cache_hits", "vllm:prefix_cache_queries", "mini_infer_host_tier_hit_tokens"


def now() -> Section:
    taken = total(SLOTS, matchers='state!="free"')
    return "Now", [
        figure("Pulled per second", "KV bytes that workers read from each other.", "Bps", rate(BYTES)),
        figure("Pulls per second", "Transfers of one request's KV, or a part of it.", "ops", rate(PULLS)),
        figure("Failed pulls per second", "Each one costs a prompt that is computed again.", "ops", rate(FAILURES),
               steps=[(0.01, "orange"), (0.05, "red")]),
        figure("Pull, p99", "99th percentile of a pull's duration; the request waits for it.", "s",
               quantile(0.99, SECONDS), steps=[(0.25, "orange"), (1, "red")]),
        figure("Waiting for KV", "Requests whose KV is on its way now.", "short", total("mini_infer_kv_loading")),
        figure("Leases", "Blocks that workers keep for others to read. They end by themselves after seconds.",
               "short", total("mini_infer_kv_leases")),
        figure("Prefix cache hits", "Share of prompt tokens that were not computed again.", "percentunit",
               ratio(HITS, QUERIES)),
        figure("Host tier in use", "Share of the host tier's slots that hold a block.", "percentunit",
               f"{taken} / {total(SLOTS)}"),
    ]  # fmt: skip


def transfers() -> Section:
    return "Transfers", [
        lines("Bytes pulled per second", "By transport, as the readers count them.", "Bps",
              {"{{transport}}": rate(BYTES, "transport")}, stacked=True),
        lines("Duration of a pull", "Median and tail by transport.", "s",
              {f"{{{{transport}}}} {name}": quantile(q, SECONDS, "transport") for name, q in QUANTILES.items()}),
        heat("Durations of pulls", "How many pulls took how long.", "s", buckets(SECONDS)),
        lines("Failed pulls per second", "By reader and transport; none: it failed before one was chosen.", "ops",
              {"{{worker}} {{transport}}": rate(FAILURES, "worker, transport")}, steps=[(0.05, "red")]),
        lines("Prefetches per second", "Parts of prompts pulled while the rest is computed. Skipped: no room, or "
              "cached already.", "ops", {"{{outcome}}": rate("mini_infer_kv_prefetches", "outcome")}, stacked=True),
        lines("Prefetched tokens per second", "Prompt tokens whose KV came before the prompt was complete.", "short",
              {"{{worker}}": rate("mini_infer_kv_prefetched_tokens", "worker")}, stacked=True),
    ]  # fmt: skip


def blocks() -> Section:
    used = total(BLOCKS, ONE_WORKER, 'state="used"')
    return "Blocks", [
        lines("KV blocks by state", "Of all workers. Cached blocks are free for whoever needs them.", "short",
              {"{{state}}": total(BLOCKS, "state")}, stacked=True),
        lines("KV in use", "Share of blocks that requests or leases hold.", "percentunit",
              {"{{worker}}": series("vllm:kv_cache_usage_perc")}, steps=[(0.95, "red")]),
        lines("Leases", "Handles that were given out and not read or released yet. Growing: readers don't come.",
              "short", {"{{worker}}": series("mini_infer_kv_leases")}),
        rows("KV by worker", "Where blocks are, and what travels.", [
            Column("blocks", total(BLOCKS, ONE_WORKER)),
            Column("used", used),
            Column("cached", total(BLOCKS, ONE_WORKER, 'state="cached"')),
            Column("leases", total("mini_infer_kv_leases", ONE_WORKER)),
            Column("waiting for KV", total("mini_infer_kv_loading", ONE_WORKER)),
            Column("pulled", rate(BYTES, ONE_WORKER), "Bps"),
            Column("failed pulls/s", rate(FAILURES, ONE_WORKER), "ops", [(0.01, "orange"), (0.05, "red")]),
        ]),
    ]  # fmt: skip


def tiers() -> Section:
    return "Prefix caches and host memory", [
        lines("Prefix cache hits", "Share of prompt tokens found in a worker's cache or in its host tier.",
              "percentunit", {"{{role}}": ratio(HITS, QUERIES, "role")}),
        lines("Tokens from the host tier per second", "Prompt tokens whose KV came back from host memory.", "short",
              {"{{worker}}": rate(HOST_HITS, "worker")}, stacked=True),
        lines("Blocks to the host tier per second", "Evicted blocks that host memory took.", "short",
              {"{{worker}}": rate("mini_infer_host_tier_stored_blocks", "worker")}, stacked=True),
        lines("Host tier slots", "Of the node agents: free, cached, or pinned by a copy or a swapped request.",
              "short", {"{{state}}": total(SLOTS, "state")}, stacked=True),
        lines("Host tier memory", "Of all node agents; made when the first worker of a kind connects.", "bytes",
              {"memory": total("mini_infer_host_tier_bytes")}),
        lines("Workers connected", "To node agents, several connections a worker with --tp. A fall means that a "
              "worker goes without the tier.", "short", {"workers": total("mini_infer_host_tier_clients")}),
    ]  # fmt: skip


def dashboard() -> str:
    description = "KV transfer between workers, KV blocks, prefix caches and the host-memory tier."
    return board("mini-infer-kv", "mini-infer: KV", description, [now(), transfers(), blocks(), tiers()])
