"""Measure tokenmill and other engines in alternation, and write docs/benchmarks.md. `python bench/peers/compare.py`

Runs in the Python in which tokenmill and matplotlib are installed; the peers are those that `python bench/peers/install.py` has installed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import machine
from contest import Contest
from engines import ENGINES, OURS, Engine, chosen
from fleet import Fleet
from plots import draw
from report import page
from results import ModelResult, Results
from rounds import CELLS, CONTEXT, PROMPT, Cell

from tokenmill.kernels.native import Pool
from tokenmill.measure.costs import Costs
from tokenmill.measure.report import Ceilings
from tokenmill.measure.timing import measure_ceilings
from tokenmill.weights.catalogue import resolve

DOCS = Path(__file__).parents[2] / "docs"
PEERS = [engine.name for engine in ENGINES if engine.name != OURS]
MODELS = ["smollm2:135m", "gemma3:270m", "qwen2.5-coder:0.5b", "qwen2.5-coder:1.5b"]


def compare(names: list[str], engines: list[Engine], rounds: int, folder: Path | None, save: Callable[[Results], None]) -> Results:
    """Measure every model; `save` is called after each, so that a broken run keeps what it has."""
    threads = len(os.sched_getaffinity(0))
    peers = [engine.name for engine in engines if engine.name != OURS] or [OURS]
    ceilings = measure_ceilings(Pool(threads))
    results = Results(
        date=datetime.date.today().isoformat(),
        command=shlex.join(["python", "bench/peers/compare.py", "--models", *names, "--peers", *peers, "--rounds", str(rounds)]),
        rounds=rounds,
        threads=threads,
        machine=machine.facts(),
        bandwidth=ceilings.read,
        int8=ceilings.int8,
        bf16=ceilings.bf16,
    )
    for name in names:
        path = folder / f"{name.replace(':', '-')}.gguf" if folder else resolve(name)
        floor = floors(Costs.of(path), ceilings)
        result = ModelResult(
            name=name,
            file=path.name,
            size=path.stat().st_size,
            floors={cell.label: cell.tokens / floor(cell) for cell in CELLS},
            seconds={},
            absent={engine.name: "left out of this run" for engine in ENGINES if engine not in engines},
        )
        results.models.append(result)
        print(f"{name}: {path.stat().st_size / 1e6:.0f} MB, {threads} threads", flush=True)
        fleet = Fleet(path, threads)
        try:
            contest = Contest(fleet, result, engines, rounds)
            contest.check()
            contest.measure()
            contest.measure_steps(chosen([OURS])[0], floor)
        finally:
            fleet.close()
            results.versions |= fleet.versions
            save(results)
    return results


def floors(costs: Costs, ceilings: Ceilings) -> Callable[[Cell], float]:
    """Seconds below which this machine cannot do a prefill, or one decode step."""

    def floor(cell: Cell) -> float:
        return costs.decode_floor(ceilings, cell.streams, CONTEXT) if cell.streams else costs.prefill_floor(ceilings, [PROMPT])

    return floor


def write(results: Results) -> None:
    """docs/benchmarks.md and its pictures."""
    plots = {name: [str(path.relative_to(DOCS)) for path in paths] for name, paths in draw(results, DOCS / "plots").items()}
    (DOCS / "benchmarks.md").write_text(page(results, plots))
    print(f"wrote {DOCS / 'benchmarks.md'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL", help="catalogue names; pulled on first use")
    parser.add_argument("--models-dir", type=Path, metavar="DIR", help="take NAME-TAG.gguf from here instead of pulling")
    parser.add_argument("--peers", nargs="+", default=PEERS, metavar="PEER", help=f"of {', '.join(PEERS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that warms up (5)")
    parser.add_argument("--json", type=Path, default=DOCS / "benchmarks.json", metavar="FILE", help="where the figures are kept")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="measure nothing, write the page from these figures")
    given = parser.parse_args()
    if given.from_json:
        write(Results.read(given.from_json))
        return
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}, but must be at least 1")
    peers = [name for name in given.peers if name != OURS]
    write(compare(given.models, chosen([OURS, *peers]), given.rounds, given.models_dir, lambda results: results.save(given.json)))


if __name__ == "__main__":
    main()
