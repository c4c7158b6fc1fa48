"""How a worker of another host comes to a gateway.

Gateway: `Challenge`. Worker: `Join`. Gateway: `Welcome`, or `Refusal` and the end. After that both say what a gateway and a worker of
its own host say to each other (`core/messages.py`, `core/handover.py`).
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import msgspec

from tokenmill.core.errors import ConfigError
from tokenmill.core.messages import EngineInfo
from tokenmill.core.proof import Fresh, Opening
from tokenmill.core.roles import Role

VERSION = 2
"""Of all that both say, before and after the welcome."""

MAX_OPENING = 2**14
"""Bytes of a message from someone who has proven nothing yet."""

OPENING_SECONDS = 10.0
"""Until either side gives up another one that says nothing, or too little."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

Reason: TypeAlias = Literal["version", "secret", "worker", "model", "fingerprint", "name", "closing"]
"""version, secret: the two do not know each other. worker: what it says of itself cannot be. model: none that is served.
fingerprint: its answers would be others than those of the workers that are there. name: a living process has it. closing: the gateway
is about to end."""

PASSING: frozenset[Reason] = frozenset({"name", "closing"})
"""Reasons that time may remove, without anybody changing something."""


class JoinRefused(Exception):
    """One side does not want the other."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Join(Opening, frozen=True, kw_only=True):
    """A worker presents itself. name: for as long as the cluster lives. info: with its boot and the address of its connector."""

    fresh: Fresh
    name: str
    role: Role
    info: EngineInfo
    proof: bytes = b""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    proof: bytes = b""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    reason: Reason
    detail: str


Answer: TypeAlias = Welcome | Refusal


def check_name(name: str) -> str:
    """Raises `ConfigError` for what cannot be a worker's name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name is {name!r}, but must be 1 to 63 letters, digits, dots, hyphens and underscores, and begin with a letter or digit",
            param="name",
        )
    return name


def check_version(version: int, who: str, here: str) -> None:
    """Raises `JoinRefused`."""
    if version != VERSION:
        told = f"the {who} speaks version {version} of the protocol, but this {here} {VERSION}"
        raise JoinRefused("version", f"{told}: install one release on all hosts")
