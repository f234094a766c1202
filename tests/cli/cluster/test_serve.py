"""`mini-infer serve` as a user runs it: real services on the dry-run model, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.cluster.ports import check_port, free_ports
from cli.cluster.serve import run
from cli.main import main
from common.errors import ConfigError
from mini_infer import LLM
from tests.harness.clients import get, post
from tests.harness.jobs import expected_texts, make_jobs, stream_jobs, texts
from tests.harness.processes import command_line, is_alive
from tests.harness.served import FLAGS, Served, assert_gone, finished, session_pids, tmp_path  # noqa: F401
from tests.harness.waiting import wait_until
from tests.packaging.documentation import commands_of, runnable

EXPERTS = ["--model=benchmarks/configs/qwen3-30b-a3b", "--load-format=dummy"]


def test_a_cluster_from_start_to_sigterm(tmp_path):  # noqa: F811
    """A kill, then a rolling restart under load: nothing is lost, and each worker is another process afterwards."""
    jobs = make_jobs(10, seed=9)
    expected = expected_texts(LLM("dry-run", num_gpu_blocks=2048, num_threads=1), jobs)
    served = Served(tmp_path, "--decode=2", "--verbose")
    try:
        text = served.wait_for("stop with Ctrl-C")
        assert f"dry-run on {served.url} (1 prefill, 2 decode)" in text
        answer = served.complete()
        (run_dir,) = tmp_path.glob("mini-infer-*")
        pids = session_pids(str(run_dir))
        workers = {pid for pid in pids if "_service " in command_line(pid)}
        assert len(workers) == 3

        chat = ("chat", "--url", served.url, "--max-tokens=32")
        piped = finished(tmp_path, *chat, stdin="hello\n/exit\n", MINI_INFER_MODEL="/models/of/some/other/server")
        assert piped.returncode == 0, piped.stderr
        assert "first token" in piped.stderr

        victim = next(pid for pid in session_pids("--worker-id=decode-1") if pid in pids)
        os.kill(victim, signal.SIGKILL)
        served.wait_for(r"decode-1 ended \(SIGKILL\); restarting it now")
        assert served.complete() == answer
        served.wait_for(r"(?s)restarting it.*decode-1: ready")
        wait_until(lambda: served.is_used("decode-1"))

        prefill = f"{served.url}/v1/workers/prefill-0/drain"
        assert post(prefill).status_code == 409  # the only one of its role
        test = "tests/cli/cluster/test_serve.py::test_a_cluster_from_start_to_sigterm"
        (drain,), (change,) = commands_of(test, "curl -X"), commands_of(test, "curl --json")
        with ThreadPoolExecutor() as pool:
            answers = pool.submit(lambda: asyncio.run(stream_jobs(served.url, jobs)))
            reply = json.loads(subprocess.check_output(["bash", "-c", runnable(drain, served.url)]))
            assert (reply["id"], reply["draining"]) == ("decode-0", True)
            assert post(f"{prefill}?force=true").status_code == 200
            assert texts(answers.result()) == expected
        for worker in ("decode-0", "prefill-0"):
            served.wait_for(rf"(?s){worker} ended normally: replacing it now.*{worker}: ready")
            wait_until(lambda worker=worker: served.is_used(worker))
        assert served.complete() == answer
        reply = json.loads(subprocess.check_output(["bash", "-c", runnable(change, served.url)]))
        assert (reply["id"], reply["role"]) == ("decode-1", "prefill")
        assert served.complete() == answer
        assert not workers & set(session_pids(str(run_dir)))
    finally:
        served.stop()
    order = re.findall(r"\| ([a-z0-9-]+): stopped", served.log.read_text())
    assert order[0] == "router"
    assert order[-1] == "agent"
    assert_gone(lambda: session_pids(str(run_dir)))
    assert not run_dir.exists()
    check_port("127.0.0.1", served.port)


def test_secrets_metrics_and_a_failure_that_ends_the_cluster(tmp_path):  # noqa: F811
    metrics_port, *_ = free_ports(3)
    served = Served(
        tmp_path, "--prefill=0", f"--metrics-port={metrics_port}", "--exit-on-failure", "--log-format=json",
        "--verbose", api_key="open-sesame",
    )  # fmt: skip
    try:
        served.wait_for(f"decode-0 on :{metrics_port}, agent on :{metrics_port + 1}, router on")
        assert served.complete()
        for index, name in enumerate(
            ("vllm:num_requests_running", "mini_infer_host_tier_slots", "vllm:generation_tokens")
        ):
            assert name in get(f"http://127.0.0.1:{metrics_port + index}/metrics").text

        processes = {pid: command_line(pid) for pid in served.pids}
        for part in (" kvstore ", " decode_service ", " worker.engine_process.main ", " router ", "rm -rf"):
            assert any(part in text for text in processes.values()), processes
        for pid, text in processes.items():
            assert "open-sesame" not in text
            knows = b"open-sesame" in Path(f"/proc/{pid}/environ").read_bytes()
            assert knows is (" router " in text), f"{text} {'has' if knows else 'lacks'} the API key"

        os.kill(next(pid for pid, text in processes.items() if " kvstore " in text), signal.SIGKILL)
        assert served.process.wait(100) == 1
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()
    *lines, last = served.log.read_text().splitlines()
    assert last == "error: agent ended (SIGKILL)"
    from_services = [json.loads(line) for line in lines if line.startswith("{")]
    assert {line["service"] for line in from_services} == {"agent", "decode-0", "router", "serve"}
    assert "engine.loader.load" in {line["logger"] for line in from_services}
    assert not any(" | " in line for line in lines), "a line is not JSON"
    assert_gone(lambda: [pid for pid in processes if is_alive(pid)])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tp=2"], "2 ranks cannot divide 9 query heads, 3 KV heads .*: choose --tp of 1, 3"),
        (["--tp=3", "--prefill-tp=2"], "2 ranks cannot divide 9 query heads"),
        (["--pp=31"], "--pp 31: the model has 30 layers"),
        (["--ep=3"], "3 ranks cannot divide no experts"),
        ([*EXPERTS, "--ep=16", "--expert-rebalance-interval=9", "--num-redundant-experts=3"], "16 ranks cannot have"),
        ([*EXPERTS, "--ep=16", "--max-model-len=99999"], "--max-model-len 99999 exceeds the model's 40960"),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused_before_anything_starts(monkeypatch, flags, told):
    monkeypatch.setattr("cli.cluster.serve.run_directory", lambda: pytest.fail("the cluster was started"))
    with pytest.raises(ConfigError, match=told):
        run(["--port=0", "--device=cpu", *flags])


def test_what_cannot_start_is_one_line_and_starts_nothing(tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr("cli.cluster.serve.run_directory", lambda: pytest.fail("the cluster was started"))
    (free,) = map(str, free_ports(1))  # on the default one somebody else may listen
    assert main(["serve", "--port", free, "--model", "/nowhere/model"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: model '/nowhere/model' not found: give")
    assert told.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--dry-run", "--port", str(port)]) == 1
    assert capsys.readouterr().err == (
        f"error: port {port} on 127.0.0.1 can't be used (address already in use): stop what listens there, "
        "or choose another with --port\n"
    )


def test_services_that_cannot_start_leave_nothing(tmp_path):  # noqa: F811
    (free,) = map(str, free_ports(1))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    broken = finished(tmp_path, "serve", "--port", free, "--model", str(tmp_path / "broken"))
    assert broken.returncode == 1
    assert "error: " in broken.stderr
    assert "ended before it was ready" in broken.stderr.splitlines()[-1]
    assert list(tmp_path.glob("mini-infer-*")) == []


def test_ports():
    first, second = free_ports(2)
    assert first != second
    check_port("127.0.0.1", first)
    with pytest.raises(ConfigError, match="can't be used"):
        check_port("192.0.2.1", first)


def test_a_port_is_kept_for_the_service_that_will_listen_there():
    first, *others = ports = free_ports(3)
    assert others == [first + 1, first + 2]
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # as the kernel does for an outgoing connection
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass
