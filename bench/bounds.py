"""What is promised of a model on this machine: figure, bound and ratio.

    python bench/bounds.py [MODEL ...] [--only prefill,decode,http,start,memory] [--threads N] [--processes N]

MODEL is a catalogue name or a path. A ratio is the share of a bound that is used up: above 1 it is missed, and the status is 1. What
the place of memory has a part in is measured in several processes, one after the other, and the median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

from bounds_jobs import LONG, SHORT, Job, asks, rate

from tokenmill.kernels.native import Pool
from tokenmill.measure.costs import Costs
from tokenmill.measure.latency import send_together
from tokenmill.measure.server import OwnServer
from tokenmill.measure.serving import Record
from tokenmill.measure.targets import ServerTarget
from tokenmill.models.loader import load
from tokenmill.weights.catalogue import resolve

PREFILL = {"smollm2-135m": 3.5, "qwen2.5-coder-1.5b": 1.6}
"""A token of a long prompt against one of a short prompt, by model."""
DECODE = 0.70
"""Of the floor, at least."""
LOSS = {1: 0.10, 32: 0.15}
"""Of the in-process engine's tokens per second, by streams."""
START = {"smollm2-135m": 1.0, "qwen2.5-coder-1.5b": 3.0}
"""Seconds, by model."""
WEIGHTS, REST = 1.15, 250e6
"""Resident memory: of the weights in their internal form, and bytes besides weights and KV."""

ROUNDS = 5
"""Of each number of streams, and starts."""


@dataclass(frozen=True)
class Promise:
    """figure, bound: in `unit`, a format; bound None: nothing is promised of this model. because: what the figure is made of."""

    part: str
    what: str
    figure: float
    bound: float | None
    unit: str
    because: str
    at_least: bool = False

    @property
    def ratio(self) -> float | None:
        if self.bound is None:
            return None
        return self.bound / self.figure if self.at_least else self.figure / self.bound

    @property
    def missed(self) -> bool:
        return self.ratio is not None and self.ratio > 1

    def render(self) -> str:
        bound, ratio, verdict = "-", "-", ""
        if self.bound is not None and self.ratio is not None:
            bound = f"{'>=' if self.at_least else '<='} {self.unit.format(self.bound)}"
            ratio, verdict = f"{self.ratio:.2f}", "MISSED" if self.missed else "met"
        return f"{self.part:<8} {self.what:<32} {self.unit.format(self.figure):>8} {bound:>10} {ratio:>6} {verdict:<7} {self.because}"


@dataclass(frozen=True)
class Subject:
    """A model as it was named, and where it lies."""

    model: str
    path: Path
    threads: int
    processes: int

    @property
    def key(self) -> str:
        """Under which it is promised something: the catalogue's name or the file's, whichever was given."""
        return Path(self.model).name.removesuffix(".gguf").replace(":", "-")


def forward(subject: Subject) -> Iterator[Promise]:
    found = []
    for _ in range(subject.processes):
        with Job("forward", subject.path, subject.threads) as job:
            found.append(job.hear())
    long, short = (1e3 * statistics.median(each[part] / tokens for each in found) for part, tokens in (("long", LONG), ("short", SHORT)))
    figure = statistics.median(each["long"] / LONG / (each["short"] / SHORT) for each in found)
    because = f"{long:.3f} and {short:.3f} ms"
    yield Promise("prefill", f"a token of {LONG} against {SHORT}", figure, PREFILL.get(subject.key), "{:.2f} x", because)
    step, read = statistics.median(each["step"] for each in found), statistics.median(each["read"] for each in found)
    figure = statistics.median(each["floor"] / each["step"] for each in found)
    each_of = " ".join(f"{each['floor'] / each['step']:.2f}" for each in found)
    because = f"{1e3 * step:.2f} ms, {read / 1e9:.1f} GB/s ({each_of})"
    yield Promise("decode", f"at {LONG} tokens: of the floor", figure, DECODE, "{:.2f}", because, at_least=True)


def http(subject: Subject) -> Iterator[Promise]:
    served: dict[int, list[float]] = {streams: [] for streams in LOSS}
    alone: dict[int, list[float]] = {streams: [] for streams in LOSS}
    losses: dict[int, list[float]] = {streams: [] for streams in LOSS}
    for _ in range(subject.processes):
        with OwnServer(subject.model, subject.threads) as server, Job("engine", subject.path, subject.threads) as job:
            for streams in LOSS:
                over_http, in_process = asyncio.run(_alternate(server, job, streams))
                served[streams] += over_http
                alone[streams] += in_process
                losses[streams].append(1 - statistics.median(over_http) / statistics.median(in_process))
    for streams, bound in LOSS.items():
        because = f"{statistics.median(served[streams]):.0f} and {statistics.median(alone[streams]):.0f} tokens/s"
        yield Promise("http", f"{streams} streams: lost of the engine", statistics.median(losses[streams]), bound, "{:.1%}", because)


async def _alternate(server: OwnServer, job: Job, streams: int) -> tuple[list[float], list[float]]:
    """Tokens per second over HTTP and of the engine alone, each idle while the other works; the first round of both, which brings
    the prompts into their prefix caches, does not count."""
    over_http, in_process = [], []
    async with ServerTarget(server.url, None, None, "completions", ignore_eos=True) as target:
        await target.check()
        for _ in range(ROUNDS + 1):
            over_http.append(rate(await send_together(target, asks(streams))))
            job.tell(str(streams))
            in_process.append((await asyncio.to_thread(job.hear))["rate"])  # the loop must see connections end meanwhile
    return over_http[1:], in_process[1:]


def start(subject: Subject) -> Iterator[Promise]:
    times = sorted([_start(subject) for _ in range(ROUNDS + 1)][1:])
    because = f"{times[0]:.2f} to {times[-1]:.2f} s"
    yield Promise("start", "warm, until ready", statistics.median(times), START.get(subject.key), "{:.2f} s", because)


def _start(subject: Subject) -> float:
    """Seconds from the start of the process to the first good answer of /ready."""
    began = time.perf_counter()
    with OwnServer(subject.model, subject.threads) as server, urllib.request.urlopen(urljoin(server.url, "/ready")):
        return time.perf_counter() - began


def memory(subject: Subject) -> Iterator[Promise]:
    """The bound counts the KV that was written, and not the whole pool, of which most is never touched."""
    weights = load(subject.path, Pool(subject.threads)).weight_bytes
    with OwnServer(subject.model, subject.threads) as server:
        records = asyncio.run(_work(server))
        resident, shared_out = _resident(server.engine_pid)
    costs = Costs.of(subject.path)
    kv = sum(costs.kv_bytes(record.prompt_tokens + record.output_tokens) for record in records)
    because = f"weights {weights / 1e6:.0f}, KV {kv / 1e6:.0f}; proportional {shared_out / 1e6:.0f}"
    yield Promise("memory", "resident, of the engine", resident / 1e6, (WEIGHTS * weights + kv + REST) / 1e6, "{:.0f} MB", because)


async def _work(server: OwnServer) -> list[Record]:
    async with ServerTarget(server.url, None, None, "completions", ignore_eos=True) as target:
        await target.check()
        return await send_together(target, asks(1, SHORT)) + await send_together(target, asks(max(LOSS)))


def _resident(pid: int) -> tuple[int, int]:
    """Rss and Pss of a process, bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    rss, pss = (int(size) * 1024 for size in re.findall(r"^(?:Rss|Pss): +(\d+) kB", text, re.MULTILINE))
    return rss, pss


PARTS: dict[str, Callable[[Subject], Iterator[Promise]]] = {
    "prefill": forward,
    "decode": forward,  # after the long prompt, so that it needs no run of its own
    "http": http,
    "start": start,
    "memory": memory,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2:135m"], metavar="MODEL")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--processes", type=int, default=3)
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    missed = False
    for model in options.models:
        subject = Subject(model, resolve(model), options.threads, options.processes)
        print(f"{model}, {subject.threads} threads\n{'promise':<41} {'figure':>8} {'bound':>10} {'ratio':>6}", flush=True)
        for part in dict.fromkeys(PARTS[name] for name in PARTS if name in wanted):
            for promise in part(subject):
                if promise.part in wanted:
                    print(promise.render(), flush=True)
                    missed |= promise.missed
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
