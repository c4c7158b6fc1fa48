"""How much of a decode step is Python, and how much of that stands in the way of the native threads.

    python bench/python_share.py [MODEL] [--streams 1,8,32] [--threads N] [--steps N] [--parts]

MODEL is a catalogue name or a path. An engine decodes in this process, its tokens are turned into text as `LLM` does, and encoded as
the engine process does. From the end of one step's execution to the end of the next one's:

    finish                   native: the tape, which the main thread has joined (the others may have begun before)
    sample                   native
    between finish and start Python in the way: nobody computes
    from start to finish     Python beside: the other threads compute

Python's parts are processor time of the main thread, the step is wall time. With one thread nothing is really beside, since nobody
computes while Python runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from tokenmill.core.config import EngineConfig
from tokenmill.core.messages import Generate, StepOutput
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.llm.outputs import Collector
from tokenmill.sampling import sampler
from tokenmill.weights.catalogue import resolve
from tokenmill.weights.vocabulary import load_tokenizer
from tokenmill.worker import wire

BOUNDS = {1: 0.05, 32: 0.10}
"""Python's share, in the way and beside, by the number of streams."""
PROMPT = 64
US = 1e6

now = time.thread_time


class Clocks:
    """Processor seconds of the main thread by part of a step. Parts may lie inside each other."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            try:
                return work(*args, **kwargs)
            finally:
                self.spent[part] += now() - begin

        return run

    def attach(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self.timed(part, getattr(owner, name)))


class Timed:
    """Stands for `behind`, some of whose functions are timed."""

    def __init__(self, behind: Any, **functions: Callable[..., Any]) -> None:
        self._behind = behind
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


def attach(engine: Any, clocks: Clocks, parts: bool) -> None:
    """Put clocks around an engine's native calls, and around its parts: the one place that knows them by their private names."""
    runner = engine._runner
    tape, native = runner._tape, runner._tape._native
    tape._native = Timed(native, start=clocks.timed("native start", native.start), finish=clocks.timed("native finish", native.finish))
    sampler._native = Timed(sampler._native, sample=clocks.timed("native sample", sampler._native.sample))
    if not parts:
        return
    for owner, name, part in (
        (runner, "_arrange", "arrange"),
        (tape, "start", "start"),
        (runner._sampler, "sample", "sample"),
        (engine._scheduler, "commit", "commit"),
        (engine._scheduler, "schedule", "schedule"),
        (engine, "_commit", "outputs"),
    ):
        clocks.attach(owner, name, part)


class Bench:
    def __init__(self, model: str, threads: int | None, most: int, steps: int, parts: bool) -> None:
        path = resolve(model)
        self._steps, self._parts = steps, parts
        settings = {} if threads is None else {"threads": threads}
        self._engine = build_engine(EngineConfig.from_settings(model=str(path), max_batch_size=most, **settings))
        self._tokenizer = load_tokenizer(path)
        self._clocks = Clocks()
        attach(self._engine, self._clocks, parts)
        self.threads = self._engine.info.threads

    def measure(self, streams: int) -> dict[str, float]:
        """Median microseconds of each part of a step that decodes that many streams."""
        engine, clocks = self._engine, self._clocks
        rng = np.random.default_rng(streams)
        collectors: dict[str, Collector] = {}
        for i in range(streams):
            params = SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=streams + self._steps + 16)
            prompt = rng.integers(0, engine.info.vocab_size, PROMPT).tolist()
            request = Generate(request_id=f"request-{i:024}", prompt=prompt, params=params)
            collectors[request.request_id] = Collector(request, None, self._tokenizer, self._engine.info)
            engine.add(request)
        while len(self._step(collectors)) < streams:
            pass
        found = []
        for _ in range(self._steps):
            clocks.spent.clear()
            begin = time.perf_counter()
            self._step(collectors)
            found.append(_parts(clocks.spent, time.perf_counter() - begin, self._parts))
        engine.close()
        return {part: US * statistics.median(step[part] for step in found) for part in found[0]}

    def _step(self, collectors: dict[str, Collector]) -> list[Any]:
        clocks = self._clocks
        begin = now()
        outputs = self._engine.step()
        clocks.spent["step"] += now() - begin
        begin = now()
        for output in outputs:
            collectors[output.request_id].push(output)
        clocks.spent["text"] += now() - begin
        begin = now()
        wire.frame(StepOutput(outputs))
        clocks.spent["wire"] += now() - begin
        return outputs


def _parts(spent: dict[str, float], whole: float, parts: bool) -> dict[str, float]:
    in_the_way = spent["step"] - spent["native finish"] - spent["native sample"] - spent["native start"]
    beside = spent["text"] + spent["wire"]
    found = {"step": whole, "native": whole - in_the_way - beside, "in the way": in_the_way, "beside": beside}
    if parts:
        names = ("schedule", "arrange", "start", "sample", "commit", "outputs")
        found |= {name: spent[name] - spent[f"native {name}"] for name in names}
        found["rest"] = in_the_way - sum(found[name] for name in names)
        found |= {"text": spent["text"], "wire": spent["wire"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--parts", action="store_true", help="print the parts too, whose clocks cost some 15 us a step")
    options = parser.parse_args()
    counts = [int(n) for n in options.streams.split(",")]
    bench = Bench(options.model, options.threads, max(counts), options.steps, options.parts)
    print(f"{options.model}, {bench.threads} threads; microseconds")
    print(f"{'streams':>7} {'step':>8} {'native':>8} {'in the way':>10} {'beside':>7} {'share':>7} {'bound':>6} {'ratio':>6}")
    for streams in counts:
        found = bench.measure(streams)
        share = (found["in the way"] + found["beside"]) / found["step"]
        bound = BOUNDS.get(streams)
        beside_it = f"{'':>6} {'':>6}" if bound is None else f"{bound:6.0%} {share / bound:6.2f}"
        print(
            f"{streams:7} {found['step']:8.0f} {found['native']:8.0f} {found['in the way']:10.0f} {found['beside']:7.0f} "
            f"{share:7.2%} {beside_it}"
        )
        for part in list(found)[4:]:
            print(f"{'':7} {part:>12} {found[part]:8.1f} {found[part] / found['step']:7.2%}")


if __name__ == "__main__":
    main()
