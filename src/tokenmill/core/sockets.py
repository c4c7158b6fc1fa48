"""Connections between hosts: their addresses, and how the end of one is seen that nobody has closed."""

from __future__ import annotations

import re
import socket

from tokenmill.core.errors import ConfigError

VANISHED_AFTER = 25
"""Seconds after which a connection ends whose other side answers nothing: its host is off, or the way there is cut."""

_ADDRESS = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+)):(\d{1,5})")


def parse_address(text: str, param: str | None = None) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPV6]:PORT`. Raises `ConfigError`."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise ConfigError(f"{text!r} is no address: it must be HOST:PORT or [IPV6]:PORT", param=param)
    return match[1] or match[2], int(match[3])


def show_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def watch_peer(sock: socket.socket) -> None:
    """Have the connection end by itself when its peer has vanished, be it idle or with bytes on their way. Messages are sent at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_AFTER * 1000)
