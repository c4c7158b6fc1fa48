"""Downloads over HTTP that go on where they broke off."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import httpx

from tokenmill.core.errors import CatalogueError
from tokenmill.weights.progress import Progress

_CONNECT_SECONDS = 4.0
_READ_SECONDS = 30.0
_ATTEMPTS = 3


class SourceFailed(CatalogueError):
    """This source cannot deliver; the next one may."""


class Network:
    """Which hosts answer. Each is asked once; the answer holds for the life of the object."""

    def __init__(self) -> None:
        self._faults: dict[str, str] = {}

    def check(self, url: str) -> None:
        """Raise `SourceFailed` when nothing answers at `url`'s host within seconds."""
        origin = str(httpx.URL(url).copy_with(raw_path=b"/"))
        if origin not in self._faults:
            self._faults[origin] = _why_silent(origin)
        if fault := self._faults[origin]:
            raise SourceFailed(f"{origin} cannot be reached: {fault}", code="unreachable")


def _why_silent(origin: str) -> str:
    """Why `origin` does not answer, empty when it does. Asks in a thread that may be abandoned, because no timeout
    bounds the system's name resolution."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            httpx.head(origin, timeout=_CONNECT_SECONDS)
            said.put("")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ImportError) as error:
            said.put(str(error) or type(error).__name__)

    threading.Thread(target=ask, name="reach", daemon=True).start()
    try:
        return said.get(timeout=_CONNECT_SECONDS + 1)
    except queue.Empty:
        return f"no answer within {_CONNECT_SECONDS + 1:.0f} s"


def download(url: str, part: Path, size: int, progress: Progress) -> None:
    """Fetch `url` into `part` until it holds `size` bytes, continuing after the bytes that are already there.

    Raises `SourceFailed` when the server refuses, sends a file of another size, or breaks off `_ATTEMPTS` times
    without sending anything; what has arrived stays in `part`.
    """
    attempts = _ATTEMPTS
    with httpx.Client(follow_redirects=True, timeout=httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)) as client:
        while (before := _size_of(part)) < size:
            try:
                _continue(client, url, part, size, progress)
                broken = "the connection was closed early"
            except httpx.HTTPError as error:
                broken = str(error) or type(error).__name__
            attempts = _ATTEMPTS if _size_of(part) > before else attempts - 1
            if not attempts:
                raise SourceFailed(f"{url}: the download broke off at {_size_of(part)} of {size} bytes: {broken}")


def _continue(client: httpx.Client, url: str, part: Path, size: int, progress: Progress) -> None:
    """One request for the bytes that are missing."""
    start = _size_of(part)
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code not in (200, 206):
            raise SourceFailed(f"{url}: the server answered {response.status_code} {response.reason_phrase}")
        if response.status_code == 200:
            start, total = 0, response.headers.get("Content-Length", "unknown")
        else:
            start, total = _content_range(response, url, start)
        if total != str(size):
            raise SourceFailed(f"{url}: the file there has {total} bytes, but the catalogue says {size}")
        with part.open("r+b" if part.exists() else "wb") as file:
            file.truncate(start)
            file.seek(start)
            for chunk in response.iter_raw():
                file.write(chunk[: size - start])
                start = min(start + len(chunk), size)
                progress.update(start)


def _content_range(response: httpx.Response, url: str, wanted: int) -> tuple[int, str]:
    """(first byte, size of the whole file) of a partial answer."""
    header = response.headers.get("Content-Range", "")
    span, _, total = header.removeprefix("bytes ").partition("/")
    if span.partition("-")[0] != str(wanted):
        raise SourceFailed(f"{url}: asked for bytes from {wanted}, the server sent {header!r}")
    return wanted, total


def _size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0
