"""How a process that nobody supervises comes to its end: by signals, and in its own time."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Departure:
    """The first SIGINT or SIGTERM asks whoever is `told` to finish what there is; the process ends at once when nobody is, at the second
    signal, and `patience` seconds after the first.

    Signals are waited for by a thread of its own: a handler would run in the middle of whatever the main thread does.
    """

    def __init__(self, patience: float) -> None:
        """To be made before any thread that is not to be interrupted."""
        self._patience = patience
        self._lock = threading.Lock()
        self._tell: Callable[[], None] | None = None
        self.asked = False
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        threading.Thread(target=self._wait, name="departure", daemon=True).start()

    @contextlib.contextmanager
    def told(self, tell: Callable[[], None]) -> Iterator[None]:
        """Meanwhile there is something to finish. tell: called at the first signal, from another thread."""
        with self._lock:
            self._tell = tell
        try:
            yield
        finally:
            with self._lock:
                self._tell = None

    def _wait(self) -> None:
        number = signal.sigwait(_SIGNALS)
        with self._lock:
            self.asked = True
            if self._tell is None:
                _end(128 + number)
            self._tell()
        second = signal.sigtimedwait(_SIGNALS, self._patience)
        if second is None:
            log.warning("the time to finish is over, but there is work: others have to do it")
            _end(0)
        else:
            _end(128 + second.si_signo)


def _end(status: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(status)
