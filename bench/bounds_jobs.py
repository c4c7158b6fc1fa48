"""What bounds.py measures without a server, in processes of their own: `python bench/bounds_jobs.py JOB PATH THREADS`.

A job writes JSON, one object a line, and ends with whoever started it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tokenmill.core.config import EngineConfig
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.kernels.native import Pool
from tokenmill.measure.costs import Costs
from tokenmill.measure.server import end_with_parent
from tokenmill.measure.serving import Record
from tokenmill.measure.steps import ForwardPass
from tokenmill.measure.targets import now
from tokenmill.measure.timing import measure_ceilings, seconds_of
from tokenmill.measure.workload import Ask, text_of
from tokenmill.weights.vocabulary import load_tokenizer

SHORT, LONG = 512, 8192
"""Tokens of the two prompts; the long one is the context of the decode steps too."""

SHORT_RUNS = 5
"""Of the short prompt, before the long one and after it."""

DECODE_ROUNDS = 4
PROMPT, OUTPUT = 128, 128
"""Tokens of a stream, about."""


class Job:
    """A job in a process of its own, from `with` to its end."""

    def __init__(self, name: str, path: Path, threads: int) -> None:
        self._command = [sys.executable, __file__, name, str(path), str(threads)]

    def __enter__(self) -> Job:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None, "a pipe was asked for"
        print(line, file=self._process.stdin, flush=True)

    def hear(self) -> Any:
        """The next object. The job's own words are on standard error if it has failed."""
        assert self._process.stdout is not None, "a pipe was asked for"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._command[1:])} ended with status {self._process.wait()} before its time")
        return json.loads(line)


def forward(path: Path, threads: int) -> Iterable[dict[str, float]]:
    """Seconds of a short prompt, of a long one and of a decode step after the long one, and the floor of that step.

    The long prompt is computed, and not only made up, so that its KV is really there and no page of it is like another.
    """
    pool = Pool(threads)
    ceilings = [measure_ceilings(pool)]
    model = ForwardPass(path, pool, LONG, 1, LONG, seed=0)
    short, long = model.prompt(SHORT), model.prompt(LONG)
    short()
    before = [seconds_of(short) for _ in range(SHORT_RUNS)]
    seconds = seconds_of(long)
    steps = [float(model.decode(ceilings[0], 1)["seconds"] or 0) for _ in range(DECODE_ROUNDS)]
    ceilings.append(measure_ceilings(pool))
    after = [seconds_of(short) for _ in range(SHORT_RUNS)]
    best = max(ceilings, key=lambda found: found.read)
    yield {
        "short": statistics.median(before + after),
        "long": seconds,
        "step": statistics.median(steps),
        "floor": Costs.of(path).decode_floor(best, 1, LONG),
        "read": best.read,
    }


def engine(path: Path, threads: int) -> Iterable[dict[str, float]]:
    """For each number of streams on a line of standard input: what an engine makes of them that does nothing else."""
    engine = build_engine(EngineConfig.from_settings(model=str(path), threads=threads))
    tokenizer = load_tokenizer(path)
    for line in sys.stdin:
        records: dict[str, Record] = {}
        for number, ask in enumerate(asks(int(line))):
            prompt = tokenizer.encode(ask.prompt)
            params = SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=ask.max_tokens)
            records[str(number)] = Record(now(), prompt_tokens=len(prompt))
            engine.add(Generate(request_id=str(number), prompt=prompt, params=params))
        while engine.has_work:
            for output in engine.step():
                record = records[output.request_id]
                record.times.append(now())
                record.output_tokens += len(output.tokens)
        yield {"rate": rate(records.values())}


def asks(streams: int, prompt: int = PROMPT) -> list[Ask]:
    """The same for the same number of streams, so that a second round finds its prompts in the prefix cache."""
    rng = np.random.default_rng(streams)
    return [Ask(text_of(prompt, rng), OUTPUT) for _ in range(streams)]


def rate(records: Iterable[Record]) -> float:
    """Tokens per second of streams that run side by side, each from its first token to its last."""
    return sum(1 / record.tpot for record in records if record.tpot)


JOBS = {"forward": forward, "engine": engine}


def main(arguments: Sequence[str]) -> None:
    job, path, threads = arguments
    for found in JOBS[job](Path(path), int(threads)):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
