import asyncio
import json

import pytest

from cli.bench import WorkloadConfig, plan, run
from common.errors import ConfigError
from tests.cli.load.sse_server import chunked, running, text_chunks


def answer(body):
    return chunked(text_chunks(body["max_tokens"], prompt_tokens=12))


async def bench(server, *flags):
    return await asyncio.to_thread(run, ["--url", server.url, "--model", "m", *flags])


async def test_a_whole_run(tmp_path, capsys):
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    async with running(answer) as server:
        code = await bench(
            server, "--num-requests=10", "--concurrency=3", "--output-len=4-6", "--warmup=1", "--slo-ttft-ms=60000",
            "--json", str(out), "--plot", str(picture),
        )  # fmt: skip
    assert code == 0
    result = json.loads(out.read_text())
    assert (result["num_completed"], result["errors"], result["good_fraction"]) == (10, {}, 1.0)
    assert result["output_tokens"] == sum(r["max_tokens"] for r in server.requests[1:])
    assert result["prompt_tokens"] == 120
    assert result["ttft_ms"]["p50"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "10/10 requests" in capsys.readouterr().err
    assert server.num_connections <= 4


async def test_a_trace_with_json_to_standard_output(tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 20 * n, "input_length": 600, "output_length": 2, "hash_ids": [0, n]} for n in range(5)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    async with running(answer) as server:
        flags = ("--trace", str(trace), "--max-requests=3", "--warmup=0", "--json=-")
        assert await bench(server, *flags) == 0
    assert json.loads(capsys.readouterr().out)["num_requests"] == 3
    prompts = [request["prompt"].split() for request in server.requests]
    assert [len(prompt) for prompt in prompts] == [600] * 3
    assert prompts[0][:512] == prompts[1][:512]


async def test_only_failures_is_exit_code_1():
    async with running(lambda _: chunked([b"{}"], status="503 Service Unavailable")) as server:
        assert await bench(server, "--num-requests=2", "--warmup=0") == 1


def test_settings_are_checked():
    for bad in ({"num_requests": 0}, {"trace_scale": 0.0}, {"request_rate": -1.0}):
        with pytest.raises(ConfigError):
            WorkloadConfig(**bad)
    with pytest.raises(ConfigError, match="--input-len"):
        plan(WorkloadConfig(input_len="many"))
