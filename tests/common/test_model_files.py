import pytest

from common.errors import ConfigError
from common.model_files import resolve_model


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
