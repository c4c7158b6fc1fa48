"""What a worker's process is called where processes are listed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import setproctitle

from tokenmill.core.config import EngineConfig


def set_title(config: EngineConfig) -> None:
    """`tokenmill: decode-0 MODEL` in the command line, as `ps` and `htop` show it, and `tm-decode-0` where there is room for 15 bytes
    (`top`, `pgrep`). A worker without others is called the engine."""
    name = None if config.kv_transfer_config is None else config.kv_transfer_config.worker
    setproctitle.setproctitle(f"tokenmill: {name or 'engine'} {config.name}")
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("tokenmill-engine" if name is None else f"tm-{name}")
