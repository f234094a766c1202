"""500 schemas of JSONSchemaBench, as people write them: few are refused, and every finished answer is valid.

    pytest -m soak tests/engine/grammar/test_json_schema_bench.py
    JSONSCHEMABENCH=FOLDER pytest -m soak tests/engine/grammar/test_json_schema_bench.py

Without FOLDER the repository is cloned once. Half a minute.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from benchmarks.accuracy.json_schemas import FAILED, REFUSED, measure

URL = "https://github.com/guidance-ai/jsonschemabench"
CACHE = Path.home() / ".cache" / "mini-infer" / "jsonschemabench"
NUM_SCHEMAS = 500
pytestmark = [pytest.mark.wing("engine.grammar"), pytest.mark.soak]


def schemas() -> Path:
    """Return the folder of schemas; skip the test if it is not available."""
    if folder := os.environ.get("JSONSCHEMABENCH"):
        return Path(folder)
    if not CACHE.is_dir():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE.parent) as temporary:
            clone = ["git", "-c", "credential.helper=", "clone", "--quiet", "--depth", "1", URL, f"{temporary}/repo"]
            environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
            try:
                subprocess.run(clone, check=True, timeout=300, env=environment, capture_output=True)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"{URL} cannot be cloned: {error}")
            Path(temporary, "repo").rename(CACHE)
    return CACHE / "data"


def test_schemas_of_people_are_followed() -> None:
    """A grammar that turns out too complex while an answer is written ends it with an error: refused late."""
    report = measure([str(schemas()), "--sample", str(NUM_SCHEMAS)])
    assert report.counts.total() == NUM_SCHEMAS
    assert report.counts[REFUSED] + report.counts[FAILED] <= 0.05 * NUM_SCHEMAS, report.reasons
    assert report.counts["invalid"] == 0, report.reasons["invalid"]
    assert report.counts["valid"] > 0.9 * NUM_SCHEMAS
