"""Tiny models and transformers' answers for them, made once for all tests of a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from tests.harness.forked import fork_followers

if TYPE_CHECKING:
    from tests.engine.tiny_models import TinyModel

Greedy = Callable[["TinyModel", Sequence[list[int]], int], tuple[Path, list[list[int]]]]


@pytest.fixture
def forked_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks without importing torch again. tests/engine/pipeline_parallel starts some by their real command."""
    fork_followers(monkeypatch)


@pytest.fixture
def byte_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have no tokenizer, or none that a grammar can use."""
    from engine.loader import load

    monkeypatch.setattr(load, "load_tokenizer", lambda _: load_tokenizer(resolve_model("dry-run")))


@pytest.fixture(scope="session")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Greedy:
    """The folder of a saved model, and its greedy tokens after each of these prompts."""
    found: dict[str, tuple[Path, list[list[int]]]] = {}

    def saved(tiny: TinyModel, prompts: Sequence[list[int]], num_tokens: int) -> tuple[Path, list[list[int]]]:
        from tests.engine.tiny_models import reference_answers  # imports transformers

        key = repr((tiny, prompts, num_tokens))
        if key not in found:
            path, model = tmp_path_factory.mktemp("tiny") / "model", tiny.build()
            tiny.save(path, model)
            found[key] = path, reference_answers(model, prompts, num_tokens)
        return found[key]

    return saved
