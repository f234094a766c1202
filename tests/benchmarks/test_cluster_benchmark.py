"""The requests of `benchmarks.clusters.roles` and its counts; the clusters themselves are not started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.clusters import roles as cluster
from benchmarks.clusters.cells import Cell, Load
from benchmarks.clusters.roles import parse_loads, scaled_rows, serve_flags
from benchmarks.model_folder import with_tokenizer
from cli.load.workload import TraceRow
from common.errors import ConfigError
from common.model_files import resolve_model
from common.text.load import load_tokenizer

ROWS = [TraceRow(float(number), 100 * (number % 10 + 1), 10, (number,)) for number in range(1000)]


def test_loads_are_parsed_and_refused() -> None:
    assert parse_loads("closed,azure:10:20.5") == [Load("closed"), Load("azure", 10.0), Load("azure", 20.5)]
    for text in ("azure", "closed:5", "other:3", "azure:fast"):
        with pytest.raises(ConfigError):
            parse_loads(text)


def test_a_trace_is_scaled_to_the_rate_and_keeps_its_rhythm() -> None:
    rows = scaled_rows(ROWS, rate=20.0, seconds=10.0, longest=0)
    assert len(rows) == 200
    assert (rows[0].at_seconds, rows[-1].at_seconds) == (0.0, 10.0)
    assert rows[100].at_seconds == pytest.approx(10.0 * 100 / 199)
    assert all(row.num_input_tokens <= 500 for row in scaled_rows(ROWS, 20.0, 10.0, longest=510))


def test_a_bare_config_gets_a_tokenizer_that_shows_every_token(tmp_path: Path) -> None:
    model = tmp_path / "bare"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 1000}')
    flags, vocab_size = with_tokenizer(["--verbose", "--model", str(model), "--tp=2"], tmp_path / "made")
    assert (vocab_size, flags) == (1000, ["--verbose", f"--model={tmp_path}/made/bare", "--tp=2"])
    detokenizer = load_tokenizer(resolve_model(f"{tmp_path}/made/bare")).detokenizer()
    assert [detokenizer.push([token_id]) for token_id in (300, 999)] == ["w300x", "w999x"]
    assert with_tokenizer(flags, tmp_path / "again") == (flags, 0)


def test_only_the_adaptive_cluster_has_objectives() -> None:
    assert serve_flags("static", 1000, 25) == ["--prefill=1", "--decode=1"]
    assert serve_flags("adaptive", 1000, 25)[2:] == ["--ttft-objective-ms=1000", "--itl-objective-ms=25"]


def test_the_picture_is_drawn_from_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    times = {"mean": 1.0, "p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0}
    cells = [
        Cell(name, "azure", rate, 100.0, rate, 1.0, times, None, {"kept": 3.0})
        for name in ("static", "adaptive")
        for rate in (2.0, 4.0)
    ]
    source, picture = tmp_path / "cells.json", tmp_path / "cells.png"
    source.write_text(json.dumps({"argv": [], "cells": [vars(cell) for cell in cells]}))
    monkeypatch.setattr(sys, "argv", ["cluster", "--from", str(source), "--plot", str(picture)])
    cluster.main()
    assert picture.stat().st_size > 1000
    assert capsys.readouterr().out.count("kept 3") == 4
