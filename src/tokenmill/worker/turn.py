"""Whose turn it is to use the engine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turn:
    """A lock that its usual holder gives up while it only waits or computes, so that others get their turn meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """By whoever has it; it is had again in the end, also after an error."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
