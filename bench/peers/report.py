"""From the results of a run to a page of Markdown. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contest import PROMPT as ASKED
from engines import ENGINES, OURS, Engine
from results import ModelResult, Results
from rounds import CELLS, CONTEXT, PROMPT, Figure

LABELS = [cell.label for cell in CELLS]

INTRO = f"""\
tokenmill beside other engines on one machine, in tokens per second. This page is written by `bench/peers/compare.py`; nothing in it
is typed by hand.

## Method
- Every engine runs in a process and an environment of its own, all with the same number of threads. While one is measured the others
  are stopped by a signal, so that they take no processor time; their weights stay in memory.
- Engines **alternate**: each cell of the table goes through all engines before the next cell begins, round after round, so that what
  disturbs the machine for a while meets all of them. Round 0 warms up and does not count. Figures are medians over the rounds, with
  (lowest–highest).
- *prefill {PROMPT}*: from a prompt of {PROMPT} token ids to its first token. *decode N*: N sequences, each after {CONTEXT} prompt tokens
  computed before the clock starts, get one token per step; tokens of all streams over the time of the steps. Token ids are random,
  the same for all engines and new in every round; generation is greedy and goes on past end tokens; prefix caches are off, or cannot hit.
- Before it is timed, each engine goes on with `{ASKED}`; one that talks nonsense
  is not measured, and the table says so.
- *ready*: seconds from the start of the engine's process until its model is loaded (compilation included, unless the engine
  finds it in its own cache; conversion of the file not).
- The *floor* is what the machine allows with the model's file: for decode the bytes that a step must read (weights, 16-bit keys and
  values) over the read bandwidth, or the products over the measured rate of dot products, whichever takes longer; for prefill the
  products.
"""


@dataclass(frozen=True)
class Quoted:
    """An engine's figures from elsewhere. cells: as printed; best: as numbers."""

    name: str
    about: str
    cells: Mapping[str, str]
    best: Mapping[str, float]


def quoted_for(model: str, path: Path = Path(__file__).parent / "quoted.toml") -> list[Quoted]:
    """The quoted engines that have figures for a model."""
    engines: list[dict[str, Any]] = tomllib.loads(path.read_text())["engines"]
    return [Quoted(e["name"], e["about"], **e["models"][model]) for e in engines if model in e["models"]]


def figures(model: ModelResult) -> dict[str, dict[str, Figure]]:
    """By engine and cell label."""
    found: dict[str, dict[str, Figure]] = {}
    for cell in CELLS:
        for engine, seconds in model.seconds.get(cell.label, {}).items():
            if seconds:
                found.setdefault(engine, {})[cell.label] = Figure.of(cell.tokens, seconds)
    return found


def best_peer(found: Mapping[str, Mapping[str, Figure]], label: str) -> tuple[str, Figure] | None:
    """The fastest measured engine but ours in a cell."""
    peers = [(name, cells[label]) for name, cells in found.items() if name != OURS and label in cells]
    return max(peers, key=lambda peer: peer[1].median, default=None)


def page(results: Results, plots: Mapping[str, Sequence[str]]) -> str:
    """The whole document. plots: paths of each model's pictures, relative to it."""
    parts = [f"# Benchmarks\n\n{INTRO}", _run(results), _engines(results)]
    parts += [_model(model, results, plots.get(model.name, ())) for model in results.models]
    parts.append(_again(results))
    return "\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, ["---"] * len(head), *rows))


def number(rate: float) -> str:
    """Three digits are told apart by the spread; more would pretend."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"


def _run(results: Results) -> str:
    facts = [[name, value] for name, value in results.machine.items()]
    facts.append(["read bandwidth, measured before the run", f"{results.bandwidth / 1e9:.1f} GB/s"])
    facts.append(["byte dot products", f"{results.int8 / 1e9:.0f} GOPS"])
    text = f"{results.date}, {results.threads} threads, {results.rounds} rounds."
    return f"## Machine and run\n{text}\n\n" + table(["", ""], facts)


def _engines(results: Results) -> str:
    rows = [[e.name, results.versions.get(e.name, "not run"), e.weights, e.counts] for e in ENGINES]
    return "## Engines\n" + table(["engine", "version", "weights", "what is counted"], rows)


def _model(model: ModelResult, results: Results, plots: Sequence[str]) -> str:
    found = figures(model)
    rows = [_row(engine, model, found) for engine in ENGINES]
    quoted = quoted_for(model.name)
    rows += [[f"*{q.name}* (quoted)", *(f"*{q.cells[label]}*" for label in LABELS), ""] for q in quoted]
    rows.append(["floor", *(number(model.floors[label]) for label in LABELS), ""])
    ours = found.get(OURS, {})
    rows.append(["**tokenmill / best measured peer**", *(_against_peers(ours, found, label) for label in LABELS), ""])
    for q in quoted:
        rows.append([f"tokenmill / {q.name} (quoted)", *(_ratio(ours, label, q.best[label]) for label in LABELS), ""])
    rows.append(["tokenmill / floor", *(_ratio(ours, label, model.floors[label]) for label in LABELS), ""])
    lines = [f"## {model.name}", f"`{model.file}`, {model.size / 1e6:.0f} MB.\n", table(["tokens/s", *LABELS, "ready, s"], rows)]
    lines += _verdict(ours, found, quoted)
    lines += [f"- {name}: {reason}" for name, reason in model.absent.items()]
    lines += [f"- {q.name}: {q.about}." for q in quoted]
    lines += [f"\n![{model.name}]({path})" for path in plots]
    if model.said:
        lines.append(f"\nWhat each engine makes of `{ASKED}`:\n")
        lines.append(table(["engine", "continuation"], [[name, f"`{text!r}`".replace("|", "\\|")] for name, text in model.said.items()]))
    return "\n".join(lines)


def _row(engine: Engine, model: ModelResult, found: Mapping[str, Mapping[str, Figure]]) -> list[str]:
    cells = found.get(engine.name)
    name = f"**{engine.name}**" if engine.name == OURS else engine.name
    if not cells:
        return [name, *["not measured"] * len(LABELS), ""]
    ready = f"{model.ready[engine.name]:.1f}" if engine.name in model.ready else ""
    return [name, *(_cell(found, engine.name, label) for label in LABELS), ready]


def _cell(found: Mapping[str, Mapping[str, Figure]], engine: str, label: str) -> str:
    figure = found[engine].get(label)
    if figure is None:
        return "not measured"
    fastest = max(cells[label].median for cells in found.values() if label in cells)
    text = number(figure.median)
    return (f"**{text}**" if figure.median == fastest else text) + f" ({number(figure.low)}–{number(figure.high)})"


def _ratio(ours: Mapping[str, Figure], label: str, other: float) -> str:
    return f"{ours[label].median / other:.2f}" if label in ours else ""


def _against_peers(ours: Mapping[str, Figure], found: Mapping[str, Mapping[str, Figure]], label: str) -> str:
    peer = best_peer(found, label)
    return f"**{_ratio(ours, label, peer[1].median)}** ({peer[0]})" if peer and label in ours else ""


def _verdict(ours: Mapping[str, Figure], found: Mapping[str, Mapping[str, Figure]], quoted: Sequence[Quoted]) -> list[str]:
    """Where a peer wins, in words."""
    lost = []
    for label in LABELS:
        peer = best_peer(found, label)
        if label not in ours:
            continue
        mine = ours[label].median
        if peer and peer[1].median > mine:
            lost.append(f"- **{peer[0]} wins {label}**: {number(peer[1].median)} tokens/s against tokenmill's {number(mine)}.")
        for q in quoted:
            if q.best[label] > mine:
                lost.append(f"- {q.name}'s quoted figure is higher in {label}: {q.cells[label]} against tokenmill's {number(mine)}.")
    if not ours:
        return ["- tokenmill was not measured."]
    return lost or ["- tokenmill is the fastest of all engines in every cell, the quoted ones included."]


def _again(results: Results) -> str:
    return f"""\
## Again
```
pip install '.[plot]'
python bench/peers/install.py          # each engine into an environment of its own, in bench/peers/.envs
{results.command}
```
`python bench/peers/compare.py --from-json FILE` writes this page again from a run's figures, which `--json FILE` keeps.
"""
