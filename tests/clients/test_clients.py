"""Clients that people use, unmodified, against services that serve a real model.

Each program of `programs/` checks its own answers. The clients are installed once, in an environment of their own:
their dependencies are many, and none of ours.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster, running_cluster
from tests.models.real_files import QWEN_CODER

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
PROGRAMS = sorted(path.stem for path in (HERE / "programs").glob("use_*.py"))
pytestmark = [pytest.mark.clients, pytest.mark.wing("engine.gguf"), pytest.mark.wing("router.tools")]


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of the clients' environment."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = HERE.parents[1] / "build" / f"clients-{digest}"
    found = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True)
        command = [str(found), "-m", "pip", "install", "-q", "-r", str(REQUIREMENTS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot install {REQUIREMENTS}: {done.stderr.strip()[-300:]}")
        (folder / "complete").touch()
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    arguments = (f"--model={QWEN_CODER.path()}", "--num-gpu-blocks=512", "--num-threads=1", "--max-model-len=4096")
    with running_cluster(engine_args=arguments, router_args=["--served-model-name=qwen"]) as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", PROGRAMS)
def test_clients(python: Path, cluster: Cluster, tmp_path: Path, program: str) -> None:
    environment = os.environ | {
        "OPENAI_BASE_URL": f"{cluster.url}/v1",
        "OPENAI_API_KEY": "none",
        "LLM_USER_PATH": str(tmp_path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no attempt to fetch prices
    }
    environment.pop("PYTHONPATH", None)
    script = HERE / "programs" / f"{program}.py"
    done = subprocess.run(
        [str(python), str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
