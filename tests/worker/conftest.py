"""Worker processes for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.worker import Worker, prefill_and_decode


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    with prefill_and_decode(tmp_path_factory.mktemp("run")) as found:
        yield found
