"""How much memory there is."""

from __future__ import annotations


def available_memory() -> int:
    """Bytes that can be used without swapping, by /proc/meminfo, or by the container's own limit if that is lower."""
    with open("/proc/meminfo") as meminfo:
        free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            allowed = limit.read().strip()
            return free if allowed == "max" else max(0, min(free, int(allowed) - int(current.read())))
    except OSError:
        return free
