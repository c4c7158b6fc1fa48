"""Speaking with one server, as long as that is worth it.

While a server fails or is slow it costs nothing: after one failure nothing is sent any more, and a timer asks with a PING, ever more
rarely, until there is an answer. So nobody who waits for entries is the one to try.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from valkey import Valkey
from valkey.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from valkey.exceptions import ValkeyError

from tokenmill.core.clock import MonotonicClock
from tokenmill.transfer.store.address import Address
from tokenmill.transfer.store.breaker import Backoff, Breaker
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.entry import Data
from tokenmill.transfer.store.protocol import CommandPacker, Refusal, ReplyReader, Room

log = logging.getLogger(__name__)

Command: TypeAlias = tuple[str | int | Data, ...]

_READ_SIZE = 16384

NO_ROOM = memoryview(b"")


class LinkPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. connect_timeout: for one address of a host. timeout: for one answer, and for one entry to be sent."""

    connect_timeout: float = 1.0
    timeout: float = 1.0
    backoff: Backoff = Backoff()


class Link:
    """Connections to one server, for any thread."""

    def __init__(self, address: Address, counts: Counts, policy: LinkPolicy) -> None:
        self.shown = address.shown
        self._counts = counts
        self._room = Room()
        self._pool = _pool(address, self._room, policy)
        self._client = Valkey(connection_pool=self._pool)
        self._client.response_callbacks.clear()  # they make an OK, or the like, of anything
        self._breaker = Breaker(MonotonicClock(), policy.backoff)
        self._timing = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = False

    @property
    def up(self) -> bool:
        """Whether anything is sent."""
        return self._breaker.closed

    def exchange(self, commands: Sequence[Command], room: memoryview = NO_ROOM) -> list[Any] | None:
        """The answers to commands that are sent together, or refusals; None when the server fails, or has failed. Values are views into
        `room`, one after the other; one that does not fit is an empty bytes."""
        if not self.up:
            self._counts.add(Count.REMOTE_SKIPPED)
            return None
        self._room.free = room
        try:
            answers = self._run(commands)
        except (ValkeyError, OSError) as error:
            self.failed(error)
            return None
        finally:
            self._room.free = NO_ROOM
        self._breaker.succeeded()
        return answers

    def failed(self, error: Exception) -> None:
        """The server has not done what it is there for."""
        self._counts.add(Count.REMOTE_FAILURES)
        times = self._breaker.failed()
        if times:
            self._counts.add(Count.REMOTE_OPENINGS)
            self._try_later()
        if times == 1:
            log.warning("the KV store at %s fails, and is done without until it answers: %s", self.shown, error)

    def close(self) -> None:
        """When no other thread uses it any more."""
        with self._timing:
            self._closed = True
            timer = self._timer
        if timer is not None:
            timer.cancel()
            timer.join()
        self._pool.disconnect()

    def _run(self, commands: Sequence[Command]) -> list[Any]:
        pipeline: Any = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers

    def _try_later(self) -> None:
        with self._timing:
            if self._closed:
                return
            self._timer = threading.Timer(self._breaker.remaining, self._try)
            self._timer.name, self._timer.daemon = "kv-store-try", True
            self._timer.start()

    def _try(self) -> None:
        if not self._breaker.admits():
            self._try_later()
            return
        try:
            (answer,) = self._run([("PING",)])
            if isinstance(answer, Refusal) and answer.code == "LOADING":
                raise answer
        except (ValkeyError, OSError) as error:
            self.failed(error)
            return
        self._breaker.succeeded()
        log.info("the KV store at %s answers", self.shown)


def _pool(address: Address, room: Room, policy: LinkPolicy) -> ConnectionPool:
    options: dict[str, Any] = {
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "socket_connect_timeout": policy.connect_timeout,
        "socket_timeout": policy.timeout,
        "socket_read_size": _READ_SIZE,
        "parser_class": functools.partial(ReplyReader, room=room),
        "command_packer": CommandPacker(),
        # No more commands than needed: a server may allow none but those.
        "lib_name": None,
        "lib_version": None,
    }
    if address.kind == "unix":
        return ConnectionPool(UnixDomainSocketConnection, path=address.path, **options)
    options |= {"host": address.host, "port": address.port, "socket_keepalive": True}
    if address.kind == "tcp":
        return ConnectionPool(Connection, **options)
    options |= {"ssl_ca_certs": address.ca, "ssl_certfile": address.cert, "ssl_keyfile": address.key, "ssl_check_hostname": True}
    return ConnectionPool(SSLConnection, **options)
