"""How a long transfer tells how far it is: a bar on a terminal, a line now and then elsewhere. All on stderr."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

_UNITS = ("B", "kB", "MB", "GB", "TB")
_LINE_SECONDS = 2.0


class Progress(Protocol):
    """One bounded task at a time; `update` takes the absolute number of bytes done."""

    def begin(self, label: str, total: int) -> None: ...
    def update(self, done: int) -> None: ...
    def end(self) -> None: ...
    def say(self, message: str) -> None: ...


def progress_for(stream: TextIO | None = None) -> Progress:
    """The form that suits `stream`, stderr if not given."""
    stream = stream if stream is not None else sys.stderr
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)


def format_size(size: float) -> str:
    """Bytes in decimal units: 98362432 is `98.4 MB`."""
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


class LineProgress:
    """One line at the beginning, then one per quarter, but not more than one in two seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label = ""
        self._total = 1
        self._quarters = 0
        self._said_at = 0.0

    def begin(self, label: str, total: int) -> None:
        self._label, self._total, self._quarters = label, max(total, 1), 0
        self.say(f"{label}: {format_size(total)}")

    def update(self, done: int) -> None:
        quarters = 4 * done // self._total
        if quarters > self._quarters and time.monotonic() > self._said_at + _LINE_SECONDS:
            self._quarters = quarters
            self.say(f"{self._label}: {25 * quarters}%")

    def end(self) -> None:
        self._stream.flush()

    def say(self, message: str) -> None:
        print(message, file=self._stream, flush=True)
        self._said_at = time.monotonic()


class BarProgress:
    """A bar with size, speed and time left."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        self._console = Console(file=stream)
        self._columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
        )
        self._new_bar = Bar
        self._bar: Bar | None = None

    def begin(self, label: str, total: int) -> None:
        self.end()
        self._bar = self._new_bar(*self._columns, console=self._console)
        self._bar.add_task(label, total=total)
        self._bar.start()

    def update(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)
