"""A listening socket and the threads that serve who connects, in bounded number."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable

from tokenmill.transfer.stream import cut

MAX_SESSIONS = 64
"""Of one door. Each decode worker keeps one connection to each prefill worker."""

_PAUSE_MS = 100
"""Before another try, if the system has no descriptor left for a connection."""


class Session:
    """One connection. known: the peer has shown that it is one of ours."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.known = False
        self._lock = threading.Lock()
        self._is_cut = False

    def wrap(self, around: Callable[[socket.socket], socket.socket]) -> None:
        """Put another socket around the one there is, which is of no use any more. Raises `ConnectionAbortedError` if it has been cut."""
        with self._lock:
            if self._is_cut:
                raise ConnectionAbortedError("the connection was cut")
            self.sock = around(self.sock)

    def cut(self) -> None:
        """Wake the session's thread, which ends then. From any thread."""
        with self._lock:
            self._is_cut = True
            cut(self.sock)


class Listener:
    """Accepts connections until it is closed, and calls `serve` for each in a thread of its own.

    Of more than `MAX_SESSIONS` the oldest that has not shown yet who it is has to go; if all have, the new one. So strangers cannot keep
    workers out by connecting and saying nothing.
    """

    def __init__(self, sock: socket.socket, serve: Callable[[Session], None], name: str) -> None:
        self._sock = sock
        self._serve = serve
        self._name = name
        self._wake = os.eventfd(0)
        self._lock = threading.Lock()
        self._sessions: dict[Session, threading.Thread] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all sessions and wait for their threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = [self._thread, *self._sessions.values()]
            for session in self._sessions:
                session.cut()
        os.eventfd_write(self._wake, 1)
        for thread in threads:
            thread.join()
        self._sock.close()
        os.close(self._wake)

    def _accept(self) -> None:
        waiting, woken = select.poll(), select.poll()
        waiting.register(self._sock, select.POLLIN)
        for poll in (waiting, woken):
            poll.register(self._wake, select.POLLIN)
        self._sock.setblocking(False)
        while not self._closed:
            waiting.poll()
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                continue
            except OSError:
                woken.poll(_PAUSE_MS)
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        session = Session(sock)
        thread = threading.Thread(target=self._run, args=(session,), name=f"{self._name}-session", daemon=True)
        with self._lock:
            stranger = next((one for one in self._sessions if not one.known), None)
            full = len(self._sessions) >= MAX_SESSIONS
            if self._closed or (full and stranger is None):
                sock.close()
                return
            if full and stranger is not None:
                stranger.cut()
                del self._sessions[stranger]
            self._sessions[session] = thread
            thread.start()

    def _run(self, session: Session) -> None:
        try:
            self._serve(session)
        finally:
            with self._lock:
                self._sessions.pop(session, None)
                session.sock.close()
