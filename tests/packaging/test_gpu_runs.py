"""The page of GPU runs is read as it is written, and its commands run in each checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reports import gpu_runs

TEXT = """# Title

## first (1 GPU, 3 minutes)

Why.

```bash
python -c print(6*7)
python -c raise(SystemExit(3))
```

## second (2 GPUs, 10 minutes)
"""


def test_sections() -> None:
    first, second = gpu_runs.sections(TEXT)
    assert first == gpu_runs.Section("first", 1, 3, ["python -c print(6*7)", "python -c raise(SystemExit(3))"])
    assert (second.num_gpus, second.minutes, second.commands) == (2, 10, [])


def test_a_heading_that_says_no_gpus_is_an_error() -> None:
    with pytest.raises(ValueError, match="## third"):
        list(gpu_runs.sections("## third\n"))


def test_the_page_has_sections_whose_commands_call_python() -> None:
    found = list(gpu_runs.sections(gpu_runs.PAGE.read_text(encoding="utf-8")))
    assert len({section.name for section in found}) == len(found) > 0
    assert all(section.commands and all(" -m " in command for command in section.commands) for section in found)


def test_commands_run_in_both_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(gpu_runs, "PAGE", page)
    assert gpu_runs.main(["first", "--before", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "first-1-before.log", "first-1-now.log", "first-2-before.log", "first-2-now.log"
    ]  # fmt: skip
    assert (tmp_path / "out/first-1-before.log").read_text(encoding="utf-8") == "42\n"
    assert "exit 3" in capsys.readouterr().out
