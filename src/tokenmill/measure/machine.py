"""The facts about this machine without which a figure means nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Machine(msgspec.Struct, frozen=True):
    """cpus: those this process may use. memory and cache (the largest of a CPU): bytes."""

    cpu: str
    cpus: int
    memory: int
    cache: int
    system: str
    python: str

    @classmethod
    def here(cls) -> Machine:
        return cls(
            cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
            cpus=len(os.sched_getaffinity(0)),
            memory=int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) * 1024,
            cache=largest_cache(),
            system=platform.release(),
            python=platform.python_version(),
        )


def largest_cache() -> int:
    """Bytes; 32 MiB where the system does not tell."""
    sizes = [_bytes(file.read_text().strip()) for file in CACHES.glob("index*/size")]
    return max(sizes, default=32 << 20)


def _bytes(text: str) -> int:
    """Of the kernel's `1024K`."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * scale[text[-1]] if text[-1:] in scale else int(text)


def _field(path: str, name: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
