"""Connectors by their names. Importing this loads no native code; opening a door does."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from tokenmill.core.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.transfer.connector import Door, Options, Side
    from tokenmill.transfer.reader import Reader

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


def open_door(connector: Connector, side: Side, options: Options) -> Door:
    """Let other workers read this one's pool. Raises `ConfigError` if the connector cannot do that here."""
    door: Door = _module(connector).open_door(side, options)
    return door


def open_reader(side: Side, options: Options) -> Reader:
    """Read other workers' pools, by whatever connector an address names."""
    from tokenmill.transfer.reader import Reader

    return Reader(side.memory, {name: _module(name).connector(side, options) for name in CONNECTORS})


def _module(connector: Connector) -> Any:
    return importlib.import_module(f"tokenmill.transfer.{connector}")
