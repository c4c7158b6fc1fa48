"""What must not be left once nothing happens any more."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
from place import PATIENCE, Place, condition, descriptors
from serving import child_pids

_HELD = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "handover_leases", "handover_reservations")
"""Metrics that are zero where nobody has anything."""

_FAULTS = ("Traceback (most recent call last)", "exception was never retrieved", "Exception in callback", "Fatal Python error")


async def settle(place: Place) -> None:
    """Wait until all workers are there and well, and have nothing. Raises AssertionError with what they still have."""
    found = "nothing was looked at"

    async def settled() -> bool:
        nonlocal found
        found = await _unsettled(place)
        return not found

    assert await place.lived.until(settled, PATIENCE), f"it does not come to rest: {found}"


async def _unsettled(place: Place) -> str:
    with contextlib.suppress(httpx.HTTPError, OSError):
        look, metrics = await place.look(), await place.metrics()
        states = {name: worker["state"] for name, worker in look.workers.items()}
        if states != dict.fromkeys(place.expected, "healthy") or look.health != 200:
            return f"/health is {look.health}, workers are {states}, expected {sorted(place.expected)}"
        own = [worker["pid"] for name, worker in look.workers.items() if name not in place.guests]
        return "; ".join(_held(metrics) + _pools_of_the_dead(own))
    return "the gateway does not answer, or a worker has just ended"


def _pools_of_the_dead(pids: Sequence[int]) -> list[str]:
    """KV pools of workers that are gone, which others of these have mapped: they are nobody's, and take room."""
    living = {inode for pid in pids for inode in _pools(pid, "rw-s")}
    return [f"process {pid} has {len(dead)} pools of the dead" for pid in pids if (dead := _pools(pid, "r--s") - living)]


def _pools(pid: int, access: str) -> set[str]:
    """Inodes. Who has made one may write to it, others read."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line[4] for line in lines if len(line) == 6 and line[1] == access and line[5].startswith("/memfd:")}


def _held(metrics: str) -> list[str]:
    found = []
    for name in _HELD:
        samples = re.findall(rf"^tokenmill:{name}{{.*}} [0-9.e+-]+$", metrics, re.MULTILINE)
        assert samples, f"no metric {name} in\n{metrics}"
        found += [sample for sample in samples if float(sample.rpartition(" ")[2])]
    if count(metrics, "kv_store_waiting"):  # which only workers with a store have
        found.append("some wait for blocks of the KV store")
    return found


def count(metrics: str, name: str, label: str = "") -> float:
    """The sum of a counter over all workers."""
    samples = re.findall(rf"^tokenmill:{name}{{[^}}]*{label}[^}}]*}} ([0-9.e+-]+)$", metrics, re.MULTILINE)
    return sum(map(float, samples))


def faults_told(place: Place) -> list[str]:
    """What the logs have of faults that nobody meant."""
    found = []
    for name, log in place.logs().items():
        for mark in _FAULTS:
            at = log.find(mark)
            if at >= 0:
                found.append(f"{name}: …{log[max(0, at - 500) : at + 3000]}")
    return found


def census(place: Place) -> dict[str, int]:
    """Descriptors of the gateway by kind, and how many processes there are beside those that have joined."""
    own = set(place.pids()) - {guest.process.pid for guest in place.guests.values()}
    return {"processes": len(own), "zombies": _zombies(place), **descriptors(place.gateway_pid)}


def _zombies(place: Place) -> int:
    below = [place.gateway_pid]
    for pid in below:
        with contextlib.suppress(OSError):
            below += child_pids(pid)
    return sum(condition(pid) == "gone" for pid in below)
