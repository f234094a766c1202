"""The comparison with vLLM, for which a module stands in: it needs a GPU and another torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.comparisons import compare_vllm_http
from benchmarks.comparisons.compare_vllm import cell, main
from benchmarks.comparisons.compare_vllm_http import VllmServer
from common.errors import UnavailableError

# Takes 1 ms for the prompts of a call and 2 ms for each further token of its answers.
VLLM = """
import json, os, time

class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings

class LLM:
    def __init__(self, **settings):
        assert os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] == "uniform_random"
        with open(os.environ["SEEN"], "a") as file:
            file.write(json.dumps(settings) + "\\n")

    def generate(self, prompts, params, use_tqdm):
        assert params.settings["ignore_eos"] and all(len(each["prompt_token_ids"]) in (16, 64) for each in prompts)
        time.sleep(0.001 + 0.002 * (params.settings["max_tokens"] - 1))
"""

# The flags of vLLM that are none of `serve`'s are left out.
SERVER = """
import os, sys

flags = [flag for flag in sys.argv[1:] if not flag.startswith("--dtype")]
serve = ["-m", "cli", "serve", "--prefill=0", "--decode=1", "--device=cpu", "--num-threads=1", *flags]
os.execv(sys.executable, [sys.executable, *serve])
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the stand-in; return the file of settings that engines were made with."""
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path / "seen"


def test_both_engines_run_the_same_shapes_in_turn(
    vllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures"
    shapes = [
        "--batch=2",
        "--prefill=64",
        "--input=16",
        "--output=21",
        f"--out={out}",
        f"--vllm-python={sys.executable}",
    ]
    assert main(["--rows=one-layer", *shapes, "--turns=1", "--device=cpu", "--num-threads=1", "--bandwidth=10"]) == 0
    [made] = map(json.loads, vllm.read_text().splitlines())
    assert (made["max_num_seqs"], made["max_model_len"], made["load_format"]) == (2, 72, "dummy")
    ours, theirs = (
        {
            each.get("batch"): each
            for each in map(json.loads, out.read_text().splitlines())
            if each["engine"] == engine
        }
        for engine in ("mini-infer", "vLLM")
    )
    assert ours.keys() == theirs.keys() == {2, None}
    assert 500 < theirs[2]["tok_s"] < 2000  # two rows, 20 tokens in 40 ms: 1,000, as sleeps are long
    assert ours[2]["tok_s"] > 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith(f"| one-layer | {ours[2]['tok_s']:,.0f} / {theirs[2]['tok_s']:,.0f} | ")


def test_an_engine_that_failed_leaves_a_dash() -> None:
    figures = [{"engine": "mini-infer", "batch": 8, "tok_s": speed} for speed in (1000.0, 3000.0, 1400.0)]
    assert cell(figures, "batch", 8, "tok_s", 1) == "1,400 / -"


def test_both_servers_get_the_same_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server of mini-infer stands in for vLLM's."""
    server = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    flags = ["--model=benchmarks/configs/one-layer", "--clients=2", "--rounds=1", "--device=cpu", "--num-threads=1"]
    assert compare_vllm_http.main(flags) == 0
    ours, theirs = map(json.loads, capsys.readouterr().out.splitlines())
    assert (ours["engine"], theirs["engine"]) == ("mini-infer", "vLLM")
    for figures in ours, theirs:
        assert figures["clients"] == 2
        assert figures["tok_s"] > 0
        assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"]


def test_a_server_that_cannot_start_is_reported() -> None:
    with pytest.raises(UnavailableError, match="ended with status 1"), VllmServer(sys.executable, ["--model=none"]):
        pass
