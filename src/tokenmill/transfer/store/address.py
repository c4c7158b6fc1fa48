"""Where a store is: one URL, taken apart and checked when the configuration is, not at the first fetch."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from tokenmill.core.errors import ConfigError

_SCHEMES: dict[str, Literal["tcp", "tls", "unix"]] = {
    "valkey": "tcp",
    "redis": "tcp",
    "valkeys": "tls",
    "rediss": "tls",
    "unix": "unix",
}
_TLS_OPTIONS = ("ca", "cert", "key")
_DEFAULT_PORT = 6379


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """ca, cert, key: PEM files, the authority to trust in place of the system's, and who this side is. shown: the URL without its
    password and files, for logs and errors."""

    kind: Literal["tcp", "tls", "unix"]
    shown: str
    host: str = ""
    port: int = _DEFAULT_PORT
    path: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


def parse_address(url: str) -> Address:
    """`valkey://[user:password@]host[:port][/db]`, `redis://` alike, `valkeys://` and `rediss://` over TLS with `?ca=&cert=&key=`, or
    `unix://[user:password@]/path[?db=]`. What is percent-encoded is decoded. Raises `ConfigError`, whose text has no password in it."""
    scheme, separator, rest = url.partition("://")
    kind = _SCHEMES.get(scheme.lower())
    if not separator or kind is None:
        # What looks like no URL may be one with a password and a slip in front of it.
        said = f"the scheme {scheme}://" if separator else "no URL"
        raise _wrong(f"kv_store has {said}: name one of {', '.join(f'{name}://' for name in _SCHEMES)}, or say embedded or none")
    shown = f"{scheme.lower()}://{rest.rpartition('@')[2].partition('?')[0]}"
    try:
        parts = urlsplit(f"{kind}://{rest}")
        port = parts.port
        asked = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        # A password with a / or ? in it ends where the host should begin, and what is left of it looks like a path or an option.
        left = parts.query if kind == "unix" else parts.path + parts.query
        if "@" in left or parts.fragment or (kind == "unix" and port is not None):
            raise ValueError("a password that is cut")
    except ValueError:
        form = f"{scheme}://user:password@host:port/db, where / ? # @ within a password are percent-encoded"
        raise _wrong(f"kv_store is {shown}, which cannot be read: its form is {form}") from None
    options: dict[str, Any] = dict(asked)
    known = {"tcp": (), "tls": _TLS_OPTIONS, "unix": ("db",)}[kind]
    for name in options:
        if name not in known:
            takes = f"only {', '.join(known)} may follow the question mark" if known else "nothing may follow a question mark"
            raise _wrong(f"kv_store is {shown} with ?{name}=, but with {scheme}:// {takes}")
    common: dict[str, Any] = {
        "kind": kind,
        "shown": shown,
        "username": _text(parts.username),
        "password": _text(parts.password),
    }
    if kind == "unix":
        if parts.hostname is not None or len(parts.path) < 2:
            raise _wrong(f"kv_store is {shown}, but a unix socket is named by its whole path, as in unix:///run/valkey.sock")
        return Address(**common, path=unquote(parts.path), db=_database(options.get("db", ""), shown))
    if not parts.hostname:
        raise _wrong(f"kv_store is {shown}, which names no host: its form is {scheme}://host:port")
    if port == 0:
        raise _wrong(f"kv_store is {shown}, but a port is between 1 and 65535")
    database = _database(parts.path.removeprefix("/"), shown)
    return Address(**common, **options, host=parts.hostname, port=port or _DEFAULT_PORT, db=database)


def _text(part: str | None) -> str | None:
    return unquote(part) if part else None


def _database(text: str, shown: str) -> int:
    if text and not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise _wrong(f"kv_store is {shown}, but its database {text!r} is not a number")
    return int(text or 0)


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param="kv_store")
