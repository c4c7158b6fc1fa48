"""By what frames get from one worker to another: the names."""

from __future__ import annotations

import difflib
from typing import Literal, TypeAlias, get_args

from tokenmill.core.errors import ConfigError

Connector: TypeAlias = Literal["shm", "tcp", "nixl"]
CONNECTORS: tuple[Connector, ...] = get_args(Connector)

_HINTS = {
    "nccl": "it moves memory of GPUs, and KV is in that of the CPU",
}


def parse_connector(name: str) -> Connector:
    """Raises `ConfigError` for a name that is none."""
    for known in CONNECTORS:
        if name == known:
            return known
    near = difflib.get_close_matches(name, CONNECTORS, n=1, cutoff=0.5)
    hint = _HINTS.get(name) or (f"did you mean {near[0]!r}?" if near else "there is no such connector")
    raise ConfigError(f"connector is {name!r}: {hint}; there are {', '.join(CONNECTORS)}", param="connector")
