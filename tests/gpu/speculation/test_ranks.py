"""A draft model or a head of rank 0 drafts for all ranks: same tokens and drafts as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import GpuConfig
from engine.engine import Engine
from tests.engine.driving import num_drafts
from tests.gpu.pipeline_parallel.test_pipeline_parallel import open_stages
from tests.gpu.speculation import test_draft_model, test_eagle
from tests.gpu.speculation.test_draft_model import models  # noqa: F401
from tests.gpu.speculation.test_drafts import PLAIN
from tests.gpu.test_engine import PROMPTS, generate, open_gpu

pytestmark = pytest.mark.wing("engine.speculation")
EAGER = GpuConfig(use_cuda_graph=False)  # ranks here are threads, but one thread captures


def open_two_ranks(
    model: Path, monkeypatch: pytest.MonkeyPatch, _: GpuConfig, **settings: Any
) -> tuple[Engine, None]:
    return open_stages(model, 1, monkeypatch, EAGER, num_ranks=2, **settings), None


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_rank_0_drafts(
    kind: str,
    models: dict[str, Path],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = test_eagle.HEADS["own-tokens"].save(tmp_path / "head")
    found = []
    for open_engine in (open_gpu, open_two_ranks):
        with monkeypatch.context() as patch:
            if kind == "draft":
                made, _ = test_draft_model.drafted_by(models, "other", patch, open_engine=open_engine)
            else:
                made, _ = test_eagle.drafted_by(models["same"], head, patch, open_engine=open_engine)
            found.append((generate(made, [PLAIN], PROMPTS[:1]), num_drafts(made)))
    assert found[0] == found[1]
    assert found[0][1][0] > 5
