"""Sockets between hosts: where doors listen and how readers reach them, with TLS if it is asked for."""

from __future__ import annotations

import socket
import ssl

from tokenmill.core.errors import ConfigError
from tokenmill.core.sockets import parse_address, show_address, watch_peer
from tokenmill.transfer.connector import Lost, Options, Refused
from tokenmill.transfer.door import listen
from tokenmill.transfer.listener import Session
from tokenmill.transfer.stream import Stream

_EVERYWHERE = ("", "0.0.0.0", "::")


def listen_at(options: Options) -> tuple[socket.socket, str]:
    """A listening socket and its address for others, HOST:PORT. Raises `ConfigError` if there is none, or no such port."""
    if options.host in _EVERYWHERE and options.advertise is None:
        raise ConfigError(
            f"the door listens on host {options.host!r}, which is no address for others: name one that they reach this host by",
            param="advertise",
        )
    sock = listen(lambda: _bound(options.host, options.port), show_address(options.host, options.port))
    return sock, show_address(options.advertise or options.host, sock.getsockname()[1])


def accept(session: Session, options: Options) -> None:
    """The door's part of a new connection. Raises OSError."""
    _prepare(session.sock, options.timeout)
    tls = options.door_tls
    if tls is not None:
        session.wrap(lambda sock: tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))
        assert isinstance(session.sock, ssl.SSLSocket)
        session.sock.do_handshake()


def reach(address: str, options: Options) -> Stream:
    """A connection to the door at HOST:PORT. Raises `Refused`, `Lost` and OSError."""
    try:
        host, port = parse_address(address)
    except ConfigError as error:
        raise Refused("address", error.message) from None
    try:
        sock = socket.create_connection((host, port), options.timeout)
    except (OSError, UnicodeError) as error:
        raise Lost("unreachable", f"no worker is at {address}: {error}") from None
    try:
        _prepare(sock, options.timeout)
        if options.reader_tls is not None:
            sock = options.reader_tls.wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise
    return Stream(sock, options.timeout)


def secret_of_reader(options: Options) -> bytes:
    """Raises `Refused` if there is none."""
    try:
        return options.require_secret()
    except ConfigError as error:
        raise Refused("secret", error.message) from None


def _bound(host: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(where[:2], family=family, dualstack_ipv6=both)


def _prepare(sock: socket.socket, timeout: float) -> None:
    """A peer whose host has vanished must not hold a connection for ever, even one on which nothing is asked for."""
    sock.settimeout(timeout)
    watch_peer(sock)
