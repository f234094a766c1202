import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from cli.load.bench import ReportConfig, WorkloadConfig, plan, run
from common.errors import ConfigError
from tests.cli.load.sse_server import SILENCE, chunked, running, text_chunks
from tests.harness.processes import command_with_signal

ROOT = Path(__file__).parents[3]


def answer(body):
    return chunked(text_chunks(body["max_tokens"], prompt_tokens=12))


async def bench(server, *flags):
    return await asyncio.to_thread(run, ["--url", server.url, "--model", "m", *flags])


async def test_a_whole_run(tmp_path, capsys):
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    async with running(answer) as server:
        code = await bench(
            server, "--url", f"{server.url}/v1/",  # what OpenAI's clients are given
            "--num-requests=10", "--concurrency=3", "--output-len=4-6", "--warmup=1", "--slo-ttft-ms=60000",
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


@pytest.mark.parametrize(
    ("body", "told"), [(b"<html>", ""), (b'{"error": {"message": "no model \'m\'"}}', "no model 'm'")]
)
async def test_only_failures_is_exit_code_1(capsys, body, told):
    async with running(lambda _: chunked([body], status="404 Not Found")) as server:
        assert await bench(server, "--num-requests=2", "--warmup=0", "--json=-") == 1
    shown = capsys.readouterr()
    assert "failed: 2 x http 404" in shown.err
    assert ("the first one: no model 'm'" in shown.err) == bool(told)
    assert json.loads(shown.out)["first_error_message"] == told


async def test_ctrl_c_ends_the_measurement_and_shows_what_was_measured():
    def answer_some(body):
        return answer(body) if len(server.requests) <= 3 else [SILENCE]

    async with running(answer_some) as server:
        command = [sys.executable, "-m", "cli", "bench", "--url", server.url, "--model=m", "--warmup=0"]
        command += ["--concurrency=1", "--num-requests=9", "--json=-"]
        process = await asyncio.create_subprocess_exec(
            *command_with_signal(signal.SIGINT, signal.SIG_DFL, command),  # a job in the background ignores it
            cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(100):
            while len(server.requests) < 4:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    assert process.returncode == 130
    assert json.loads(out)["num_completed"] == 3
    assert b"3/3 requests" in err
    assert b"Traceback" not in err


def test_a_report_that_cannot_be_written_ends_bench_before_it_starts(tmp_path, monkeypatch):
    for flag in ("--json", "--plot"):
        with pytest.raises(ConfigError, match=f"{flag} .*/no/x.png: .*/no is not a directory"):
            run(["--url", "http://127.0.0.1:1", f"{flag}={tmp_path}/no/x.png"])
    with pytest.raises(ConfigError, match=r"x\.txt: choose a name that ends with \.png, \.svg, \.pdf"):
        ReportConfig(plot=f"{tmp_path}/x.txt")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        ReportConfig(plot=f"{tmp_path}/x.png")


def test_settings_are_checked():
    for bad in ({"num_requests": 0}, {"trace_scale": 0.0}, {"request_rate": -1.0}):
        with pytest.raises(ConfigError):
            WorkloadConfig(**bad)
    with pytest.raises(ConfigError, match="--input-len"):
        plan(WorkloadConfig(input_len="many"))
