"""Downloads from a hub on loopback that breaks off in the middle or cannot be reached."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from http import HTTPStatus
from pathlib import Path

import pytest

import common.download
from tests.common.fake_hub import FakeHub, Handler, etag
from tests.harness.processes import command_with_signal

ROOT = Path(__file__).parents[3]
HUB_ID = "org/tiny"
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(range(256)) * 100_000}
CUT_AT = 11_000_000  # bytes of the weights that arrive; huggingface_hub writes pieces of 10 MB


class BreakingHandler(Handler):
    server: "BreakingHub"

    def send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        is_file, wanted = "ETag" in headers, self.headers.get("Range")
        if is_file and self.command == "GET":
            self.server.ranges.append((self.path.rpartition("/")[2], wanted))
        if is_file and wanted:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers |= {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
            body, status = body[start:], HTTPStatus.PARTIAL_CONTENT
            if self.server.is_breaking and self.server.is_down_afterwards:
                body, status = b"", HTTPStatus.SERVICE_UNAVAILABLE
        super().send(status, body, headers)

    def write(self, body: bytes) -> None:
        if len(body) < CUT_AT or not (self.server.is_breaking or self.server.is_slow):
            self.wfile.write(body)
        elif self.server.is_breaking:
            self.wfile.write(body[: 0 if self.headers.get("Range") else CUT_AT])
            self.close_connection = True
        else:
            for begin in range(0, len(body), 1 << 20):
                self.wfile.write(body[begin : begin + (1 << 20)])
                time.sleep(0.05)


class BreakingHub(FakeHub):
    daemon_threads = True
    handler = BreakingHandler
    is_breaking = False
    is_down_afterwards = False  # answers no client that goes on; it would wait a second, five times
    is_slow = False
    ranges: list[tuple[str, str | None]]


@pytest.fixture
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    with BreakingHub(HUB_ID, folder) as server:
        server.ranges = []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def environment(endpoint: str, home: Path, **more: str) -> dict[str, str]:
    timeouts = {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    return os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), **timeouts, **more}


def download(endpoint: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = environment(endpoint, folder.parents[1] / "home")
    return subprocess.run(command(folder), cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", common.download.__name__, HUB_ID, str(folder)]


def download_into_cache(endpoint: str, home: Path, **more: str) -> str:
    """Return the folder that was found, or the error."""
    code = (
        "from common.download.hub import download\nfrom common.errors import ConfigError\n"
        f"try: print(download({HUB_ID!r}))\nexcept ConfigError as error: print(error)"
    )
    env = environment(endpoint, home, **more)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
    )
    return done.stdout.strip()


def test_an_interrupted_download_keeps_what_it_has_and_the_folder_appears_when_it_is_whole(hub, tmp_path):
    folder = tmp_path / "models" / "tiny"
    hub.is_breaking = True
    first = download(hub.url, folder)
    assert first.returncode == 1, first.stderr
    assert "cannot download org/tiny" in first.stderr
    assert ("model.safetensors", "bytes=10485760-") in hub.ranges  # went on within the file, for a while
    assert not folder.exists()
    hub.is_breaking, hub.ranges = False, []
    second = download(hub.url, folder)
    assert second.returncode == 0, second.stderr
    assert sorted(hub.ranges) == [("config.json", None), ("model.safetensors", "bytes=10485760-")]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert list(folder.parent.iterdir()) == [folder]
    assert "is there" in download("http://127.0.0.1:9", folder).stdout  # asks nobody


def test_what_an_interrupted_download_left_is_not_taken_for_a_model_without_the_hub(hub, tmp_path):
    folder = tmp_path / "models" / "tiny"
    partial = folder.with_name("tiny.partial")
    partial.mkdir(parents=True)
    (partial / "config.json").write_bytes(FILES["config.json"])
    result = download("http://127.0.0.1:9", folder)
    assert result.returncode == 1
    assert "cannot download org/tiny" in result.stderr
    assert not folder.exists()


def test_a_download_goes_on_within_a_file_after_ctrl_c(hub, tmp_path):
    folder = tmp_path / "models" / "tiny"
    hub.is_slow = True
    env = environment(hub.url, tmp_path / "home")
    interruptible = command_with_signal(signal.SIGINT, signal.SIG_DFL, command(folder))
    process = subprocess.Popen(interruptible, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    part = folder.with_name("tiny.partial") / ".cache" / "parts" / etag(FILES["model.safetensors"])
    while not (part.exists() and part.stat().st_size):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "the same command goes on" in process.communicate(timeout=100)[1]
    assert process.returncode == 130
    num_bytes = part.stat().st_size
    assert 0 < num_bytes < len(FILES["model.safetensors"])
    hub.is_slow, hub.ranges = False, []
    assert download(hub.url, folder).returncode == 0
    assert ("model.safetensors", f"bytes={num_bytes}-") in hub.ranges
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_the_hubs_cache_goes_on_within_a_file_unless_its_part_is_another(hub, tmp_path):
    hub.is_breaking = hub.is_down_afterwards = True
    assert "cannot download org/tiny" in download_into_cache(hub.url, tmp_path / "home")
    [part] = (tmp_path / "home").rglob("parts/*")
    assert part.stat().st_size == 10485760
    for is_spoilt in (False, True):
        home = tmp_path / f"home-{is_spoilt}"
        shutil.copytree(tmp_path / "home", home)
        if is_spoilt:
            [part] = home.rglob("parts/*")
            part.write_bytes(b"x" * 100)
        hub.is_breaking, hub.ranges = False, []
        found = Path(download_into_cache(hub.url, home))
        asked = [wanted for name, wanted in hub.ranges if name == "model.safetensors"]
        assert asked == (["bytes=100-", None] if is_spoilt else ["bytes=10485760-"])
        assert (found / "model.safetensors").read_bytes() == FILES["model.safetensors"]
        assert not list(home.rglob("parts/*"))
    assert Path(download_into_cache("http://127.0.0.1:9", home)) == found  # without the hub


def test_a_switch_for_fast_networks_leaves_all_to_the_hubs_client(hub, tmp_path):
    hub.is_breaking = hub.is_down_afterwards = True
    download_into_cache(hub.url, tmp_path, HF_XET_HIGH_PERFORMANCE="1")
    assert not list(tmp_path.rglob("parts"))
