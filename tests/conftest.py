from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tokenmill.weights.catalogue import resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M (GGUF, Q4_1), pulled into the user's cache by the first test run on a machine."""
    return resolve("smollm2:135m")


class ModelServer(ThreadingHTTPServer):
    """Files over HTTP with ranges, and the ways in which that goes wrong."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes | Path] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.ranges = True
        self.cut_after: int | None = None
        """Bytes after which each answer breaks off."""
        self.stall_after: int | None = None
        """Bytes after which an answer waits for `release`, having set `stalled`."""
        self.stalled = threading.Event()
        self.release = threading.Event()
        self.log: list[tuple[str, str, str | None]] = []
        """(method, path, Range) of every request."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def fetches(self, path: str) -> list[str | None]:
        """The Range header of each GET of `path`."""
        return [span for method, asked, span in self.log if method == "GET" and asked == path]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        server, span = self.server, self.headers.get("Range")
        path = self.path.partition("?")[0]
        server.log.append((self.command, path, span))
        content = server.files.get(path)
        if content is None:
            self.send_error(404)
            return
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        start = int(span.removeprefix("bytes=").rstrip("-")) if span and server.ranges else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - start))
        for name, value in server.headers.get(path, {}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self._send(content if isinstance(content, bytes) else content.read_bytes(), start)

    def _send(self, content: bytes, start: int) -> None:
        server, end = self.server, len(content)
        if server.cut_after is not None:
            end = min(end, start + server.cut_after)
        if server.stall_after is not None:
            stop = min(end, start + server.stall_after)
            self.wfile.write(content[start:stop])
            self.wfile.flush()
            server.stalled.set()
            server.release.wait(60)
            start = stop
        self.wfile.write(content[start:end])
        self.close_connection = end < len(content)

    def log_message(self, format: str, *args: object) -> None:
        """The tests read `log`."""


@pytest.fixture
def model_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    """A stand-in for Hugging Face, to which `HF_ENDPOINT` points; pip sees no index."""
    server = ModelServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()
