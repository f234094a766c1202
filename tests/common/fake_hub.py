"""A model hub with one model, for `huggingface_hub`: no real one can be reached from a test.

`python fake_hub.py ORG/NAME FOLDER PORT [TOKEN]` serves the files of FOLDER; with TOKEN, to clients that send it.
Imports only the standard library, so that a container without this project can run it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """`asked` lists the files that were downloaded."""

    handler: type[Handler]

    def __init__(self, model: str, folder: Path, host: str = "127.0.0.1", port: int = 0, token: str = "") -> None:
        self.model = model
        self.token = token
        files = [path for path in folder.rglob("*") if path.is_file()]
        self.files = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        self.asked: list[str] = []
        super().__init__((host, port), self.handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        hub = self.server
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.send(HTTPStatus.UNAUTHORIZED, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path == f"/api/models/{hub.model}/revision/main":
            siblings = [{"rfilename": name} for name in hub.files]
            self._send_json({"id": hub.model, "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/models/{hub.model}/tree/{COMMIT}":
            entries = hub.files.items()
            self._send_json([
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)} for name, data in entries
            ])  # fmt: skip
        elif (data := hub.files.get(path.removeprefix(f"/{hub.model}/resolve/{COMMIT}/"))) is not None:
            if self.command == "GET":
                hub.asked.append(path.rpartition("/")[2])
            self.send(HTTPStatus.OK, data, {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT})
        else:
            self.send(HTTPStatus.NOT_FOUND, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_json(self, value: object) -> None:
        self.send(HTTPStatus.OK, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.write(body)

    def write(self, body: bytes) -> None:
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: tests look at `asked`."""


FakeHub.handler = Handler


def etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    model, folder, port, *token = sys.argv[1:]
    FakeHub(model, Path(folder), "0.0.0.0", int(port), *token).serve_forever()
