"""Worker processes for the tests of a file, and what one engine answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.worker import PROMPT, Worker, prefill_and_decode


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    with prefill_and_decode(tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest.fixture(scope="session")
def expected() -> list[int]:
    from engine import LLM, SamplingParams

    llm = LLM("dry-run", num_gpu_blocks=256, num_threads=1)
    return llm.generate([PROMPT], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))[0].token_ids
