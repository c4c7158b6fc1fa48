"""Which CPUs the threads of an engine are kept on: `0-3,8`, one thread for each CPU listed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from tokenmill.core.errors import ConfigError

MAX_CPU = 1023
"""The system call's own set of CPUs ends here."""

_PART = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)


def parse_cpus(text: str | None, threads: int) -> tuple[int, ...]:
    """The CPUs that `text` lists, in its order; None lists none.

    Raises `ConfigError` for what is no such list, for a CPU that is listed twice, and if `threads` (0: not given) is not
    their number.
    """
    if text is None:
        return ()
    parts = [_PART.fullmatch(part) for part in text.split(",")]
    spans = [(int(part[1]), int(part[2] or part[1])) for part in parts if part]
    if len(spans) < len(parts) or not all(first <= last <= MAX_CPU for first, last in spans):
        raise ConfigError(f"cpus is {text!r}, but must list CPUs up to {MAX_CPU} such as 0-3,8", param="cpus")
    found = [cpu for first, last in spans for cpu in range(first, last + 1)]
    twice = sorted({cpu for cpu in found if found.count(cpu) > 1})
    if twice:
        raise ConfigError(f"cpus is {text!r}, which lists {show_cpus(twice)} twice: each CPU takes one thread", param="cpus")
    if threads not in (0, len(found)):
        raise ConfigError(
            f"threads is {threads}, but cpus lists {len(found)} ({text}), one for each thread: leave threads out, or list {threads}",
            param="threads",
        )
    return tuple(found)


def show_cpus(cpus: Iterable[int]) -> str:
    """`0-3,8` for a set of CPUs."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def usable_cpus() -> set[int]:
    """Those that this process may use: fewer than the machine has under `taskset` or in a container."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def require_usable(cpus: Iterable[int]) -> None:
    """Raise `ConfigError` unless this process may keep threads on all of `cpus`."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("cpus: this system cannot keep threads on CPUs: leave it out, and give threads", param="cpus")
    usable = usable_cpus()
    unusable = set(cpus) - usable
    if unusable:
        raise ConfigError(
            f"cpus lists {show_cpus(unusable)}, which this process may not use or which does not exist: it may use {show_cpus(usable)}",
            param="cpus",
        )
