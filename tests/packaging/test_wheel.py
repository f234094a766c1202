"""The result of `pip install`: built from the sources alone, installed outside of them, started by its commands.

Third-party packages are those of this environment, because torch is large; the project comes from the wheel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common import VERSION
from tests.harness.processes import command_line
from tests.harness.served import FLAGS, Served
from tests.packaging.documentation import commands_of, runnable
from tests.test_repository import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/packaging/test_wheel.py"
BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"
TOP_LEVEL = [*PACKAGES, "protos"]


def run(*command: str | Path, cwd: Path, **kwargs) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=200, env=clean_environment(cwd), **kwargs
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean_environment(runtime_dir: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MINI_INFER_"))}
    return kept | {"XDG_RUNTIME_DIR": str(runtime_dir), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Make a folder with a short path, because it has sockets."""
    with tempfile.TemporaryDirectory(prefix="mi-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def sdist(folder: Path) -> Path:
    """Build the source distribution from a copy without stubs, like a fresh clone."""
    source = folder / "source"
    for package in TOP_LEVEL:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, source)
    name = run(sys.executable, "-c", BUILD, "build_sdist", folder, cwd=source).splitlines()[-1]
    return folder / name


@pytest.fixture(scope="module")
def wheel(folder: Path, sdist: Path) -> Path:
    """Build the wheel from the source distribution."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    return folder / run(sys.executable, "-c", BUILD, "build_wheel", folder, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def installed(folder: Path, wheel: Path) -> Path:
    """Return the programs of an environment with the wheel and the packages of this environment."""
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    (site_packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # A path file adds a folder without reading the path files in it: the editable installation there stays out.
    (site_packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin"


def test_a_source_distribution_has_the_protos_and_no_stubs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    protos = {str(path.relative_to(ROOT)) for path in ROOT.glob("protos/*.proto")}
    assert len(protos) >= 4
    assert {*protos, "build_stubs.py", "LICENSE", "README.md", "pyproject.toml"} <= names
    assert [name for name in names if "_pb2" in name or name.startswith("tests/")] == []


def test_a_wheel_has_the_stubs_and_nothing_of_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for path in ROOT.glob("protos/*.proto"):
        assert {f"protos/{path.stem}{end}" for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")} <= names
    folders = {name.partition("/")[0] for name in names}
    assert folders == {*TOP_LEVEL, f"mini_infer-{VERSION}.dist-info"}
    assert {f"{package}/py.typed" for package in TOP_LEVEL} <= names
    assert f"mini_infer-{VERSION}.dist-info/licenses/LICENSE" in names


def test_the_python_api_of_an_installation(folder: Path, installed: Path) -> None:
    program = (
        "import sys, mini_infer\nprint(mini_infer.__version__, 'torch' in sys.modules)\n"
        "from mini_infer import LLM, SamplingParams\nprint(LLM.__module__, SamplingParams(max_tokens=3).max_tokens)\n"
        f"import {', '.join(TOP_LEVEL)}\nprint([m.__file__ for m in ({', '.join(TOP_LEVEL)})])"
    )
    first, second, files = run(installed / "python", "-c", program, cwd=folder).splitlines()
    assert first == f"{VERSION} False"
    assert second == "engine.offline.llm 3"
    assert files.count(str(folder / "venv" / "lib")) == len(TOP_LEVEL)


# The output of documented commands, by how the command begins.
PRINTS = {
    "curl http": '"finish_reason":',
    "mini-infer-chat": ".",
    "mini-infer-demo": "stopped reading after 3 pieces",
    "mini-infer demo": "one answer",
    "mini-infer bench --concurrency": "16/16 requests",
    "mini-infer bench --trace": "goodput: ",
    "curl ROUTER/livez": "ok",
}
TRACE = """{"timestamp": 0, "input_length": 600, "output_length": 90, "hash_ids": [1, 2]}
{"timestamp": 400, "input_length": 700, "output_length": 80, "hash_ids": [1, 3]}
"""


def test_the_installed_commands_serve_chat_bench_and_show_the_demo(folder: Path, installed: Path) -> None:
    """As the documentation has them, in a folder with modules that have the names of our packages."""
    here = folder / "project"
    here.mkdir()
    for package in TOP_LEVEL:
        (here / f"{package}.py").write_text("raise ImportError('a module of the user')\n")
    (here / "conversation_trace.jsonl").write_text(TRACE)
    served = Served(here, program=[str(installed / "mini-infer-serve")])
    env = clean_environment(here) | {"PATH": f"{installed}:{os.environ['PATH']}"}
    try:
        served.wait_for("stop with Ctrl-C")
        assert httpx.get(f"{served.url}/version", timeout=60.0).json() == {"version": VERSION}
        for file in re.findall('(?:href|src)="(/page/[^"]+)"', httpx.get(f"{served.url}/", timeout=60.0).text):
            assert httpx.get(f"{served.url}{file}", timeout=60.0).status_code == 200
        for command in filter(None, map(command_line, served.pids)):
            assert command.startswith((str(installed), "/bin/sh"))
        for command in commands_of(f"{HERE}::test_the_installed_commands_serve_chat_bench_and_show_the_demo"):
            if command == "mini-infer-serve --dry-run":
                assert "--dry-run" in FLAGS  # with which it was started
                continue
            done = subprocess.run(
                ["bash", "-c", runnable(command, served.url)], cwd=here, env=env, input="hello\n", text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200,
            )  # fmt: skip
            (printed,) = (pattern for prefix, pattern in PRINTS.items() if command.startswith(prefix))
            assert done.returncode == 0, f"{command}:\n{done.stdout}"
            assert re.search(printed, done.stdout), f"{command}:\n{done.stdout}"
        assert json.loads((here / "result.json").read_text())["num_completed"] == 2
        assert (here / "result.png").read_bytes().startswith(b"\x89PNG")
    finally:
        served.stop()
