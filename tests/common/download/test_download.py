"""Downloads from a hub on loopback that breaks off in the middle, and is out of reach."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import common.download
from tests.harness.processes import command_with_signal

ROOT = Path(__file__).parents[3]
HUB_ID = "org/tiny"
COMMIT = "a" * 40
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(range(256)) * 100_000}
CUT_AT = 11_000_000  # bytes of the weights that arrive; huggingface_hub writes pieces of 10 MB


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.is_breaking = False
        self.is_down_afterwards = False  # answers no client that goes on; it would wait a second, five times
        self.is_slow = False
        self.asked: list[tuple[str, str | None]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{HUB_ID}/revision/"):
            siblings = [{"rfilename": name} for name in FILES]
            self.send(200, json.dumps({"id": HUB_ID, "sha": COMMIT, "siblings": siblings}).encode(), with_body, {})
        elif path == f"/api/models/{HUB_ID}/tree/{COMMIT}":
            tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": "b" * 40} for name in FILES]
            self.send(200, json.dumps(tree).encode(), with_body, {})
        elif (name := path.rpartition("/")[2]) in FILES and "/resolve/" in path:
            data, headers, status = FILES[name], {}, 200
            if with_body:
                self.server.asked.append((name, self.headers.get("Range")))
            if wanted := self.headers.get("Range"):
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                data, status = data[start:], 206
                if self.server.is_breaking and self.server.is_down_afterwards:
                    data, status = b"", 503
            headers |= {"ETag": f'"{hashlib.sha256(FILES[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.send(status, data, with_body, headers, cut=name == "model.safetensors")
        else:
            self.send(404, b"{}", with_body, {})

    def send(self, status: int, data: bytes, with_body: bool, headers: dict, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and cut and self.server.is_breaking:
            self.wfile.write(data[: 0 if "Content-Range" in headers else CUT_AT])
            self.close_connection = True
        elif with_body and cut and self.server.is_slow:
            for begin in range(0, len(data), 1 << 20):
                self.wfile.write(data[begin : begin + (1 << 20)])
                time.sleep(0.05)
        elif with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


def environment(endpoint: str, home: Path, **more: str) -> dict[str, str]:
    timeouts = {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    return os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), **timeouts, **more}


def download(endpoint: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = environment(endpoint, folder.parents[1] / "home")
    return subprocess.run(command(folder), cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", common.download.__name__, HUB_ID, str(folder)]


def download_into_cache(endpoint: str, home: Path, **more: str) -> str:
    """The folder that was found, or the error."""
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
    assert ("model.safetensors", "bytes=10485760-") in hub.asked  # went on within the file, for a while
    assert not folder.exists()
    hub.is_breaking, hub.asked = False, []
    second = download(hub.url, folder)
    assert second.returncode == 0, second.stderr
    assert sorted(hub.asked) == [("config.json", None), ("model.safetensors", "bytes=10485760-")]
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
    part = (
        folder.with_name("tiny.partial") / ".cache" / "parts" / hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    )
    while not (part.exists() and part.stat().st_size):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "the same command goes on" in process.communicate(timeout=100)[1]
    assert process.returncode == 130
    num_bytes = part.stat().st_size
    assert 0 < num_bytes < len(FILES["model.safetensors"])
    hub.is_slow, hub.asked = False, []
    assert download(hub.url, folder).returncode == 0
    assert ("model.safetensors", f"bytes={num_bytes}-") in hub.asked
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
        hub.is_breaking, hub.asked = False, []
        found = Path(download_into_cache(hub.url, home))
        asked = [wanted for name, wanted in hub.asked if name == "model.safetensors"]
        assert asked == (["bytes=100-", None] if is_spoilt else ["bytes=10485760-"])
        assert (found / "model.safetensors").read_bytes() == FILES["model.safetensors"]
        assert not list(home.rglob("parts/*"))
        assert Path(download_into_cache("http://127.0.0.1:9", home)) == found  # without the hub


def test_a_switch_for_fast_networks_leaves_all_to_the_hubs_client(hub, tmp_path):
    hub.is_breaking = hub.is_down_afterwards = True
    download_into_cache(hub.url, tmp_path, HF_XET_HIGH_PERFORMANCE="1")
    assert not list(tmp_path.rglob("parts"))
