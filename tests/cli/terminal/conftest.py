"""A server whose tokens come when the test sends them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import pytest

from tests.cli.load.sse_server import event


class Server(ThreadingHTTPServer):
    """Streams what is put into `pieces`, as one answer until None."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.pieces = Queue()
        self.questions = Queue()
        self.was_cancelled = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = b'{"data": [{"id": "tiny"}]}' if self.path == "/v1/models" else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.questions.put(body["messages"][-1]["content"] if "messages" in body else body["prompt"])
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while (piece := self.server.pieces.get()) is not None:
                self._write(event(choices=[{"delta": {"content": piece}}]))
            self._write(b"data: [DONE]\n\n")
            self._write(b"")
        except ConnectionError:
            self.server.was_cancelled.set()

    def _write(self, part):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.pieces.put(None)
        server.shutdown()
        thread.join()
