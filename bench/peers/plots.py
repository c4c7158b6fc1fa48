"""Pictures of a run's figures, as PNG files."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib
from engines import ENGINES, OURS
from report import figures
from results import ModelResult, Results
from rounds import CELLS, CONTEXT

matplotlib.use("Agg")

import matplotlib.pyplot as plt

OUR_COLOUR, PEER_COLOUR, FLOOR_COLOUR = "#c2410c", "#94a3b8", "#334155"


def draw(results: Results, folder: Path) -> dict[str, list[Path]]:
    """Each model's pictures: tokens per second of the engines, and tokenmill's step time against batch size."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, list[Path]] = {}
    for model in results.models:
        stem = model.name.replace(":", "-")
        paths = [_engines(model, folder / f"peers-{stem}.png")]
        if model.steps:
            paths.append(_steps(model, folder / f"steps-{stem}.png"))
        drawn[model.name] = paths
    return drawn


def _engines(model: ModelResult, path: Path) -> Path:
    found = figures(model)
    names = [engine.name for engine in ENGINES if engine.name in found][::-1]
    picture, axes = plt.subplots(1, len(CELLS), figsize=(13, 0.9 + 0.42 * len(names)), sharey=True, layout="constrained")
    for cell, axis in zip(CELLS, axes, strict=True):
        for name in names:
            if (figure := found[name].get(cell.label)) is None:
                continue
            spread = [[figure.median - figure.low], [figure.high - figure.median]]
            axis.barh(name, figure.median, color=OUR_COLOUR if name == OURS else PEER_COLOUR, xerr=spread, ecolor=FLOOR_COLOUR)
            axis.text(0, name, f" {figure.median:.0f}", va="center", ha="left", color="white" if name == OURS else "black", weight="bold")
        axis.set_title(f"{cell.label}  (floor {model.floors[cell.label]:.0f})", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    picture.suptitle(f"{model.name}: tokens per second, median and spread")
    return _save(picture, path)


def _steps(model: ModelResult, path: Path) -> Path:
    picture, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    streams = [step.streams for step in model.steps]
    times = [[1e3 * s for s in sorted(step.seconds)] for step in model.steps]
    middle = [statistics.median(t) for t in times]
    axis.fill_between(streams, [t[0] for t in times], [t[-1] for t in times], color=OUR_COLOUR, alpha=0.2, linewidth=0)
    axis.plot(streams, middle, "o-", color=OUR_COLOUR, label="tokenmill, median and spread")
    axis.plot(streams, [1e3 * step.floor for step in model.steps], "--", color=FLOOR_COLOUR, label="floor of this machine")
    axis.set(xlabel=f"streams in the batch, {CONTEXT} tokens of context each", ylabel="ms", title=f"{model.name}: time of a decode step")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return _save(picture, path)


def _save(picture: plt.Figure, path: Path) -> Path:
    picture.savefig(path, dpi=110)
    plt.close(picture)
    return path
