"""What engine processes of one model cost in memory when one process holds the weights, and how soon a killed one is back.

    python bench/worker_memory.py [MODEL] [--workers 1,2,4] [--kv-gb GB] [--threads N] [--rounds N]

Each worker's KV pool is filled by one long prompt, so that all of it is resident and can be subtracted. Pss divides a page by the number
of processes that have it, so that its sum is what they take together; the sum of Rss counts shared pages for each of them. Megabytes of
10^6 bytes.

floor: the packed weights once and each worker's KV pool. Each further: what a worker adds to the run with one, less its KV pool; floor:
the activations of a step of that prompt, which no two workers can share. Apart: two workers with weights of their own, for comparison.

Back: seconds from SIGKILL to the next worker's readiness, by the supervisor's policy. floor: the same with engines that have nothing to
build. Loaded anew: the same when the process that holds the weights is killed too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.cluster.nursery import WORKER_COMMAND, Nursery
from tokenmill.cluster.supervisor import RestartPolicy, State, Supervisor
from tokenmill.core.config import EngineConfig
from tokenmill.core.messages import EngineInfo, Generate, Stats
from tokenmill.core.types import FRAME, SamplingParams
from tokenmill.kernels.native import Pool
from tokenmill.models.loader import load
from tokenmill.weights.catalogue import resolve
from tokenmill.worker.main import main as run_worker

PATIENCE = 0.002
"""Seconds between two looks."""

POLICY = RestartPolicy(healthy_after=0.0)
"""Every kill is the first."""

NOTHING = (sys.executable, "-P", __file__, "nothing")
"""Engines that have nothing to build, and nothing to share."""


class Nothing:
    """An engine that is ready at once and never asked for anything but its end."""

    has_work = in_step = False

    def __init__(self, config: EngineConfig) -> None:
        self.info = EngineInfo(
            model=config.name, architecture="none", vocab_size=1, max_model_len=1, kv_tokens=0, kv_bytes=0, kv_bytes_per_token=0,
            kv_format="none", kv_bytes_saved_per_token=0, max_batch_size=1, chunk_size=8, threads=1, kernels="none", fingerprint="", pid=0,
            load_seconds=0.0,
        )  # fmt: skip

    def stats(self) -> Stats:
        needed = [field.name for field in msgspec.structs.fields(Stats) if field.required]
        return Stats(**{name: {} if name == "kv_pages" else 0 for name in needed})

    def start_step(self) -> None:
        """It has none."""

    def close(self) -> None:
        """It has nothing."""


class Group(NamedTuple):
    """Workers of one nursery, each with its supervisor."""

    supervisors: list[Supervisor]

    @property
    def pids(self) -> list[int]:
        """Of the nursery, then of the workers."""
        workers = [one.info.pid for one in self.supervisors]
        return [int(re.findall(r"^PPid:\s+(\d+)", Path(f"/proc/{workers[0]}/status").read_text(), re.MULTILINE)[0]), *workers]


@contextlib.asynccontextmanager
async def group(config: EngineConfig, workers: int, command: Sequence[str] = WORKER_COMMAND) -> AsyncIterator[Group]:
    nursery = Nursery(config, command)
    supervisors = [Supervisor(config, nursery.spawn, policy=POLICY) for _ in range(workers)]
    try:
        for one in supervisors:
            await one.start()
        yield Group(supervisors)
    finally:
        for one in supervisors:
            await one.stop(0)
        await nursery.close()


async def fill(one: Supervisor) -> None:
    """The worker's KV pool, and with it every page that a prompt's steps use."""
    length = min(one.info.kv_tokens, one.info.max_model_len) - FRAME
    request = Generate(request_id="fill", prompt=[7] * length, params=SamplingParams(max_tokens=2, ignore_eos=True, seed=1))
    one.client.send(request)
    while (await one.client.stats()).generation_tokens < 2:
        await asyncio.sleep(0.05)


def memory(pids: Sequence[int]) -> tuple[float, float]:
    """Sums of Pss and Rss, MB."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    pss, rss = (sum(int(re.findall(rf"^{name}: +(\d+) kB", text, re.MULTILINE)[0]) for text in texts) for name in ("Pss", "Rss"))
    return pss * 1024 / 1e6, rss * 1024 / 1e6


async def back(config: EngineConfig, rounds: int, command: Sequence[str] = WORKER_COMMAND, nursery_too: bool = False) -> float:
    """Median seconds from a kill to readiness."""
    times = []
    async with group(config, 1, command) as one:
        supervisor = one.supervisors[0]
        for _ in range(rounds + 1):
            nursery, worker = one.pids
            began, restarts = time.perf_counter(), supervisor.restarts
            if nursery_too:
                os.kill(nursery, signal.SIGKILL)
            os.kill(worker, signal.SIGKILL)
            while supervisor.restarts == restarts or supervisor.state is not State.READY:
                await asyncio.sleep(PATIENCE)
            times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


async def measure(options: argparse.Namespace) -> None:
    path = resolve(options.model)
    config = EngineConfig.from_settings(model=str(path), threads=options.threads, kv_cache_config={"memory_budget_gb": options.kv_gb})
    model = load(path, Pool(options.threads))
    weights = model.weight_bytes / 1e6
    active = sum(4 * buffer.width * (1 if buffer.rows == "outputs" else config.chunk) for buffer in model.program.buffers) / 1e6
    del model
    print(f"{options.model}: packed weights {weights:.0f} MB, KV pool {options.kv_gb * 2**30 / 1e6:.0f} MB per worker")
    print(f"{'':24} {'Pss MB':>8} {'floor':>8} {'ratio':>6} {'Rss MB':>8} {'each further MB':>16} {'floor':>8} {'ratio':>6}")
    alone = 0.0

    def show(name: str, workers: int, kv: float, pids: Sequence[int]) -> float:
        """Prints a row. Returns what all of it takes beside KV."""
        (pss, rss), floor = memory(pids), weights + workers * kv
        beside = pss - workers * kv
        row = f"{name:24} {pss:8.0f} {floor:8.0f} {pss / floor:6.2f} {rss:8.0f}"
        if workers > 1 and alone:
            further = (beside - alone) / (workers - 1)
            row += f" {further:16.1f} {active:8.1f} {further / active:6.2f}"
        print(row, flush=True)
        return beside

    for workers in options.workers:
        async with group(config, workers) as several:
            for one in several.supervisors:
                await fill(one)
            beside = show(f"{workers} workers", workers, several.supervisors[0].info.kv_bytes / 1e6, several.pids)
            alone = beside if workers == 1 else alone
    async with contextlib.AsyncExitStack() as both:
        groups = [await both.enter_async_context(group(config, 1)) for _ in range(2)]
        for each in groups:
            await fill(each.supervisors[0])
        show("2 workers, apart", 2, groups[0].supervisors[0].info.kv_bytes / 1e6, [pid for each in groups for pid in each.pids])
    print(f"\n{'back after SIGKILL':24} {'median s':>8} {'floor':>8} {'ratio':>6}")
    least = await back(config, options.rounds, NOTHING)
    for name, nursery_too in {"forked": False, "loaded anew": True}.items():
        figure = await back(config, options.rounds, nursery_too=nursery_too)
        print(f"{name:24} {figure:8.3f} {least:8.3f} {figure / least:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--workers", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--kv-gb", type=float, default=0.05)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    logging.disable()
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["nothing"]:
        del sys.argv[1]
        run_worker(lambda config: Nothing)
    else:
        main()
