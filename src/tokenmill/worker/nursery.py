"""A process that forks workers from itself: what it has loaded is in the memory of all of them, and there once.

A fork copies page tables and no pages; a page is copied when one of the processes writes to it, and packed weights are never written.
Android starts applications from such a process, its zygote. A fork keeps only the thread that calls it, so that there must be no other:
what a load starts has ended before the first fork, and each worker starts its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator

from tokenmill.core.errors import Unavailable
from tokenmill.core.messages import Failed
from tokenmill.worker import control
from tokenmill.worker.control import Ended, Forked


class Nursery:
    """The parent of workers, which tells by `sock` how they end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._workers: dict[int, int] = {}
        """Process numbers by pidfd."""
        self._events = select.poll()
        self._events.register(sock, select.POLLIN)

    def tend(self) -> socket.socket | None:
        """Fork whenever asked, until the other side has gone: None. Returns in each forked process too: its stream.

        Raises `ConnectionError`, if the other side goes just then.
        """
        _end_threads()  # those of Python; NumPy's library ends its own before a fork
        gc.collect()
        gc.freeze()  # a collection would write to every object, and so copy them all
        while True:
            for descriptor, _ in self._events.poll():
                if descriptor in self._workers:
                    self._tell_end(descriptor)
                    continue
                packet = control.receive(self._sock)
                if packet is None:
                    return None
                stream = self._fork(packet.descriptor)
                if stream is not None:
                    return stream

    def _fork(self, descriptor: int | None) -> socket.socket | None:
        """The worker's stream in the worker, None in this process."""
        if descriptor is None:
            self._refuse("it may open no more descriptors")
            return None
        stream = socket.socket(fileno=descriptor)
        sys.stdout.flush()  # else what is buffered is written twice
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            stream.close()
            self._refuse(str(error))
            return None
        if pid == 0:
            self._leave()
            return stream
        stream.close()
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = pid
        self._events.register(pidfd, select.POLLIN)
        control.send(self._sock, Forked(pid), pidfd)
        return None

    def _leave(self) -> None:
        """In a worker: what its siblings' ends are seen by is no business of its own, and a signal to the nursery's group neither."""
        for pidfd in self._workers:
            os.close(pidfd)
        self._sock.close()
        os.setsid()

    def _refuse(self, why: str) -> None:
        error = Unavailable(f"the process that holds the model could not fork an engine process: {why}")
        control.send(self._sock, Failed.of(error, ""))

    def _tell_end(self, pidfd: int) -> None:
        status = exit_status(pidfd)
        assert status is not None, "a worker is a child of its nursery, and nobody else waits for it"
        self._events.unregister(pidfd)
        os.close(pidfd)
        control.send(self._sock, Ended(self._workers.pop(pidfd), status))


def exit_status(pidfd: int) -> int | None:
    """Of a process that has ended, a signal's number negated; afterwards its number is free. None if it is no child of this process."""
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return None
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


@contextlib.contextmanager
def ended_with(sock: socket.socket) -> Iterator[None]:
    """Meanwhile the process ends at once when the other side of `sock` has gone, whatever it is doing. Nothing is read."""
    awake, wake = socket.socketpair()

    def watch() -> None:
        events = select.poll()
        events.register(sock, 0)  # a hang-up is told unasked
        events.register(awake, select.POLLIN)
        if any(descriptor == sock.fileno() for descriptor, _ in events.poll()):
            sys.stderr.flush()
            os._exit(0)

    watching = threading.Thread(target=watch, name="hang-up", daemon=True)
    watching.start()
    try:
        yield
    finally:
        wake.close()
        watching.join()
        awake.close()


def _end_threads() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
