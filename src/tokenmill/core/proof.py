"""Who knows a shared secret, shown over a connection without telling it.

Each side proves it by an HMAC over a number that the other one has just drawn, and over all that it says itself. The secret never
travels, what was overheard proves nothing later, and what one side has said is no proof of the other, which speaks in another role.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Annotated, Protocol, TypeAlias

import msgspec

from tokenmill.core.errors import ConfigError

SECRET_BYTES = 16
"""Of a shared secret at least."""

_FRESH_BYTES = 32

Fresh: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=_FRESH_BYTES, max_length=_FRESH_BYTES)]
"""Random bytes that whoever else proves something has to take into the proof."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What the first message of any version of a protocol has."""

    version: int


class Challenge(Opening, frozen=True, kw_only=True):
    """What the side says first that others have connected to."""

    fresh: Fresh


class _Said(Protocol):
    """A message that carries its proof."""

    @property
    def proof(self) -> bytes: ...


def draw() -> bytes:
    """A `Fresh`."""
    return secrets.token_bytes(_FRESH_BYTES)


def prove(secret: bytes, role: str, fresh: bytes, message: msgspec.Struct) -> bytes:
    """The `proof` of a message, which is over all its other fields. role: of who says it; no two roles of any protocol are the same.
    fresh: of the other side."""
    said = msgspec.msgpack.encode(msgspec.structs.replace(message, proof=b""))
    return hmac.digest(secret, b"%s %s %s" % (role.encode(), fresh, said), hashlib.sha256)


def is_proven(secret: bytes, role: str, fresh: bytes, message: _Said) -> bool:
    assert isinstance(message, msgspec.Struct)
    return hmac.compare_digest(message.proof, prove(secret, role, fresh, message))


def read_secret(path: str) -> bytes:
    """White space around it is not part of it, so that `openssl rand -hex 32 > FILE` makes one. Raises `ConfigError`."""
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"secret_file {path} cannot be read: {error.strerror}", param="secret_file") from None


def require_secret(secret: bytes, whose: str) -> bytes:
    """Raises `ConfigError` if there is none, or one that can be guessed."""
    if len(secret) < SECRET_BYTES:
        raise ConfigError(
            f"the secret of {whose} has {len(secret)} bytes, but must have at least {SECRET_BYTES}: give all workers the same random one",
            param="secret",
        )
    return secret
