"""Connectors by their names (core/connectors.py). Importing this loads no native code; opening a door does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokenmill.core.connectors import CONNECTORS, Connector

if TYPE_CHECKING:
    from tokenmill.transfer.connector import Door, Options, Side
    from tokenmill.transfer.reader import Reader


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
