"""Models in several GGUF files, as `gguf-split` and the `gguf` package write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.sizing.model_size import weight_bytes
from common.errors import ConfigError
from common.gguf.parts import read_gguf
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.config import EngineConfig
from tests.engine.driving import generate, open_model, random_prompt
from tests.engine.gguf.gguf_files import write_gguf
from tests.engine.tiny_models import VOCAB_SIZE, TinyModel, reference_greedy

TINY = TinyModel("Llama")


def part_names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three parts of a model of 30 tensors."""
    write_gguf(tmp_path / "m.gguf", TINY.build(), "llama", tensors_per_part=11)
    assert sorted(path.name for path in tmp_path.iterdir()) == part_names("m", 3)
    return tmp_path


@pytest.mark.parametrize("given", [0, 2])
def test_any_part_stands_for_all(given: int, folder: Path) -> None:
    files = resolve_model(str(folder / part_names("m", 3)[given]))
    assert files.name == "m"
    loaded, config = open_model(files, dtype="float32")
    prompt = random_prompt(30, VOCAB_SIZE, 1)
    assert generate(loaded, config, prompt, 3)[0] == reference_greedy(TINY.build(), prompt, 3)
    other = folder / part_names("m", 3)[2 - given]
    assert open_model(resolve_model(str(other)), dtype="float32")[0].fingerprint == loaded.fingerprint


def test_all_parts_are_measured(folder: Path) -> None:
    paths = [folder / name for name in part_names("m", 3)]
    num_parameters = sum(parameter.numel() for parameter in TINY.build().parameters())
    assert [weight_bytes(EngineConfig(str(path))) for path in paths] == [2 * num_parameters] * 3


def test_a_missing_part_is_named(folder: Path) -> None:
    first, second, third = (folder / name for name in part_names("m", 3))
    second.unlink()
    for given in (first, third):
        with pytest.raises(ConfigError, match=r"m-00002-of-00003\.gguf is missing: all 3 parts"):
            open_model(resolve_model(str(given)))
        with pytest.raises(ConfigError, match=r"m-00002-of-00003\.gguf is missing"):
            load_tokenizer(resolve_model(str(given)))


def test_parts_in_another_order_are_named(folder: Path) -> None:
    _, second, third = (folder / name for name in part_names("m", 3))
    second.rename(folder / "kept")
    third.rename(second)
    (folder / "kept").rename(third)
    with pytest.raises(ConfigError, match=r"m-00002-of-00003\.gguf holds part 3 of 3"):
        read_gguf(folder / part_names("m", 3)[0])


def test_parts_of_another_count_are_named(folder: Path) -> None:
    write_gguf(folder / "n.gguf", TINY.build(), "llama", tensors_per_part=16)
    (folder / part_names("n", 2)[1]).rename(folder / part_names("m", 3)[1])
    with pytest.raises(ConfigError, match=r"m-00002-of-00003\.gguf holds part 2 of 2"):
        read_gguf(folder / part_names("m", 3)[0])
    for name in ("n.gguf", "n-00001-of-00003.gguf"):
        path = folder / name
        (folder / part_names("n", 2)[0]).rename(path)
        with pytest.raises(ConfigError, match=rf"{name} is a part of a model of 2 .*must end in -of-00002\.gguf"):
            read_gguf(path)
        path.rename(folder / part_names("n", 2)[0])


@pytest.mark.parametrize(
    ("changes", "per_part", "message"),
    [
        ({"tie_word_embeddings": True}, 11, r"m-00001-of-00003\.gguf is a part of a model of 30 .*here hold 29"),
        ({"attention_bias": True}, 14, r"m-00002-of-00003\.gguf and m-00003-of-00003\.gguf both hold the tensor"),
    ],
)
def test_parts_of_unlike_models_are_named(
    changes: dict[str, object], per_part: int, message: str, folder: Path
) -> None:
    write_gguf(folder / "n.gguf", TinyModel("Llama", changes).build(), "llama", tensors_per_part=per_part)
    (folder / part_names("n", 3)[2]).rename(folder / part_names("m", 3)[2])
    with pytest.raises(ConfigError, match=message):
        read_gguf(folder / part_names("m", 3)[0])
