"""What processes are called where they are listed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import setproctitle

from tokenmill.core.config import EngineConfig


def set_title(config: EngineConfig, name: str | None = None) -> None:
    """`tokenmill: decode-0 MODEL` in the command line, as `ps` and `htop` show it, and `tm-decode-0` where there is room for 15 bytes
    (`top`, `pgrep`). name: instead of the worker's own. A worker without others is called the engine."""
    if name is None and config.kv_transfer_config is not None:
        name = config.kv_transfer_config.worker
    setproctitle.setproctitle(f"tokenmill: {name or 'engine'} {config.name}")
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("tokenmill-engine" if name is None else f"tm-{name}")
