"""GET /explain/{id}: decisions, the time line, and the record after a choice has ended."""

from __future__ import annotations

import asyncio
import gc

import pytest

from router.journal import Journal
from tests.harness.router import cluster
from tests.harness.scripted_worker import Script


@pytest.mark.parametrize("max_entries", [1024, 0])
async def test_what_the_log_forgets_changes_no_answer(max_entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.explain.log.MAX_ENTRIES", max_entries)
    async with cluster(script=Script(cached_tokens=3)) as c:
        events = await c.events(stream_options={"include_usage": True})
        assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        memory = (await c.http.get("/v1/cluster")).json()["memory"]
        assert memory["explain_entries"] == min(max_entries, 1)


async def test_explain_shows_the_decision_and_a_time_line_that_sums_up() -> None:
    async with cluster(num_prefill=1, num_decode=2, local_prefill_tokens=0) as c:
        answer = (await c.chat()).json()
        shown = (await c.http.get(f"/explain/{answer['id']}")).json()
        choice = shown["choices"][0]
        assert choice["state"] == "length"
        assert len(choice["decisions"][0]["candidates"]) == 2
        assert choice["decisions"][0]["chosen"]["prefill"] == "p0"
        assert [item["phase"] for item in choice["workers"]] == ["prefill", "decode"]
        assert sum(span["seconds"] for span in choice["time_line"]) == pytest.approx(
            choice["total_seconds"], abs=1e-4
        )
        assert (await c.http.get("/explain/chatcmpl-unknown")).status_code == 404
        known = choice["hindsight"]
        assert known["regret_ms"] == pytest.approx(
            1e3 * (known["chosen"]["cost_seconds"] - known["best"]["cost_seconds"]), abs=2e-3
        )
        prefill, decode = choice["workers"]
        terms = known["chosen"]["terms_seconds"]
        assert terms["queue"] == prefill["queue_seconds"]
        assert terms["compute"] == pytest.approx(prefill["prefill_seconds"] + prefill["kv_pull_seconds"], abs=2e-6)
        assert terms["pull"] == decode["kv_pull_seconds"]
        assert terms["decode"] < choice["total_seconds"]
        assert known["measured_workers"] == ["p0", decode["worker"]] or known["measured_workers"] == [
            decode["worker"],
            "p0",
        ]


async def test_no_regret_is_told_of_what_is_open_or_went_on_elsewhere() -> None:
    async with cluster(num_decode=2, script=Script(is_silent=True)) as c:
        asking = asyncio.create_task(c.chat(max_tokens=6))
        await c.until(lambda: c.decode[0].submits or c.decode[1].submits)
        [name] = c.gateway.models[0].dispatcher.open_choices
        [choice] = (await c.http.get(f"/explain/{name.choice_id}")).json()["choices"]
        assert (choice["state"], choice["hindsight"]) == ("open", None)
        asking.cancel()
    async with cluster(num_decode=2) as c:
        for worker in c.decode:
            worker.script.die_after_tokens = 3
        answer = (await c.chat(max_tokens=6)).json()
        [choice] = (await c.http.get(f"/explain/{answer['id']}")).json()["choices"]
        assert choice["migrations"] >= 1
        assert choice["hindsight"] is None


async def test_what_has_ended_keeps_its_counts_and_not_its_text() -> None:
    async with cluster(num_decode=1) as c:
        answer = (await c.chat("a secret", max_tokens=5)).json()

        def is_kept() -> bool:
            gc.collect()
            # Not isinstance: it asks for __class__, which some deprecated objects of torch warn about.
            journals = [thing for thing in gc.get_objects() if type(thing) is Journal]
            return any(journal.choice_id.startswith(answer["id"]) for journal in journals)

        await c.until(lambda: not is_kept())  # the connection lets go of its last request a moment after the answer
        [choice] = (await c.http.get(f"/explain/{answer['id']}")).json()["choices"]
        assert (choice["state"], choice["output_tokens"]) == ("length", 5)
        assert choice["prompt_tokens"] == answer["usage"]["prompt_tokens"]
