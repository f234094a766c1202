"""A hub id as `--model`: files that a new process finds on a hub that runs here."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import common.download  # noqa: F401  what tests/wings.py sees: this file goes with the wing
from tests.common.fake_hub import FakeHub

ROOT = Path(__file__).parents[3]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    for name in ("consolidated.safetensors", "original/model.safetensors", "original/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"the same weights for other programs")
    with FakeHub("org/tiny", folder, token="hf_secret") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


RESOLVE = """
import ast, sys
from common.errors import ConfigError
from common.model_files import resolve_model
for model, needs_weights in ast.literal_eval(sys.argv[1]):
    try: print(resolve_model(model, weights=needs_weights).path)
    except ConfigError as error: print(error)
"""


def resolve_elsewhere(hub: FakeHub, home: Path, token: str, *models: tuple[str, bool]) -> list[str]:
    """Return what a new process finds, a line each: huggingface_hub reads its environment when it is imported.

    models: with whether their weights are needed.
    """
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    command = [sys.executable, "-c", RESOLVE, repr(models or [("org/tiny", True)])]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=True)
    return done.stdout.splitlines()


def test_a_hub_id_is_downloaded_once_and_its_weights_only_for_those_who_compute(hub, tmp_path):
    home = tmp_path / "home"
    [path] = map(Path, resolve_elsewhere(hub, home, "hf_secret", ("org/tiny", False)))
    assert path.is_relative_to(home)
    assert sorted(hub.asked) == ["config.json", "tokenizer.json"]
    assert resolve_elsewhere(hub, home, "hf_secret") == [str(path)]
    assert sorted(hub.asked) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (path / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_a_gguf_file_of_a_hub_id_is_named_by_its_quantization(hub, tmp_path):
    del hub.files["config.json"]
    parts = [f"Q8_0/tiny-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]
    names = ("tiny-Q4_K_M.gguf", "tiny-UD-Q4_K_M.gguf", "mmproj-F16.gguf", *parts)
    hub.files |= {name: name.encode() for name in names}
    asked = [(":q4_k_m", True), (":Q8_0", False), (":Q8_0", True), (":Q3_K_S", True), ("", True)]
    models = [(f"org/tiny{quantization}", needs_weights) for quantization, needs_weights in asked]
    four_bits, first_part, eight_bits, other, unnamed = resolve_elsewhere(hub, tmp_path, "hf_secret", *models)
    assert four_bits.endswith("/tiny-Q4_K_M.gguf")
    assert first_part.endswith(f"/{parts[0]}")
    assert eight_bits == first_part
    assert hub.asked[:3] == ["tiny-Q4_K_M.gguf", *(Path(part).name for part in parts)]  # a part as it is needed
    assert other == "org/tiny has no GGUF file named Q3_K_S; it has Q4_K_M, Q8_0, UD-Q4_K_M"
    assert "name one, as in org/tiny:Q4_K_M, org/tiny:Q8_0" in unnamed


def test_what_keeps_a_hub_id_from_loading_is_told_apart(hub, tmp_path):
    assert "set HF_TOKEN" in resolve_elsewhere(hub, tmp_path / "home", token="")[0]
    [told] = resolve_elsewhere(hub, tmp_path / "home", "hf_secret", ("org/other", True))
    assert "org/other is not on the hub" in told
    no_folder = tmp_path / "file"
    no_folder.touch()
    [told] = resolve_elsewhere(hub, no_folder, "hf_secret")
    assert told.startswith(f"cannot keep org/tiny in {no_folder}/hub: Not a directory")
    assert "set HF_HOME" in told
    hub.shutdown()
    hub.server_close()
    assert "check the network" in resolve_elsewhere(hub, tmp_path / "home", "hf_secret")[0]
