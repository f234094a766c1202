"""Every script of examples/ runs as its first lines say, and the README's Python as it is, on the dry-run model."""

from __future__ import annotations

import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness.cluster import running_cluster
from tests.packaging.documentation import ROOT, page, runnable

EXAMPLES = ROOT / "examples"
OFFLINE = {
    "llm.py": r"(?s)length: .*length: .* \| .*chat: ['\"].*yes or no: (yes|no)\n",
    "async_llm.py": r"(?s)(?=.*Ann: )(?=.*Bob: ).*chat: ['\"]",
}
SERVED = {
    "openai_streaming.py": r"\n[1-9]\d* tokens from dry-run\n$",
    "openai_multi_turn.py": r"(?s)> Name .*\(0 tokens.*> Which .*\([1-9]\d* tokens.*> What .*\([1-9]\d* tokens",
    "openai_json_schema.py": r"name='.*' country='.*' population=\d+\n(positive|negative)\n$",
}
MODULES = {
    "scheduling_policy.py",  # tests/engine/custom_policies/test_custom_policies.py serves with it
    "train_eagle_head.py",  # tests/engine/speculation/eagle/test_training.py trains with it
    "eagle_states.py",  # likewise
}
COMMANDS = {"serve.py": "serve", "quick_chat.py": "chat", "demo.py": "demo"}


def as_script(text: str) -> str:
    """What is written for asyncio's own prompt (`python -m asyncio`), with a coroutine around it."""
    if "async with" not in text:
        return text
    return f"import asyncio\nasync def main():\n{textwrap.indent(text, '    ')}\nasyncio.run(main())\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_have_their_old_names_too(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert not ended.value.code
    assert f"usage: mini-infer {COMMANDS[name]}" in capsys.readouterr().out


def test_every_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(scripts: dict[str, str], *arguments: str) -> None:
        """In this process, which has paid for importing torch already."""
        for name, pattern in scripts.items():
            monkeypatch.setattr(sys, "argv", [name, *arguments])
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
            printed = capsys.readouterr().out
            assert re.search(pattern, printed), f"{name} printed:\n{printed}"

    assert {path.name for path in EXAMPLES.glob("*.py")} == {*OFFLINE, *SERVED, *MODULES, *COMMANDS}
    run(OFFLINE, "--model", "dry-run")
    pages = page(ROOT / "README.md").blocks + page(ROOT / "docs/install.md").blocks
    blocks = [text for language, text in pages if language == "python"]
    assert len(blocks) == 3
    with running_cluster(num_prefill=0) as cluster:
        run(SERVED, "--url", cluster.url)
        for block in blocks:
            script = tmp_path / "readme.py"
            script.write_text(runnable(as_script(block), cluster.url))
            runpy.run_path(str(script))  # what a random model answers may be nothing
