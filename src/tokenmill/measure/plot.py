"""Charts as PNG files. What is drawn is plain data; only drawing loads matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Line:
    """dashed: a bound, not a measurement. joined: whether points that follow each other are."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Chart:
    """Lines in one pair of axes, which are logarithmic (to base 2 for x, 10 for y) if asked."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Bars:
    """For each group a bar of each series. values: by series, one number per group; None leaves a gap."""

    title: str
    y_label: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class HeatMap:
    """Shares between 0 and 1, each written into its cell. values: by row, one number per column; None leaves the cell empty."""

    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]


Picture = Chart | Bars | HeatMap


def require_matplotlib() -> None:
    """Raise `ConfigError` saying how to install it, before anything is measured in vain."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'tokenmill[plot]'", param="plot")


def draw(pictures: Sequence[Picture], path: Path) -> None:
    """Write the pictures side by side into one PNG file, which is empty of no pictures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = dict.fromkeys(label for picture in pictures for label in _labels(picture))
    colours = {label: f"C{number}" for number, label in enumerate(series)}  # the same in all pictures
    places = max(1, len(pictures))
    figure, axes = pyplot.subplots(1, places, figsize=(7 * places, 5), squeeze=False, layout="constrained")
    for picture, ax in zip(pictures, axes[0], strict=False):
        match picture:
            case Chart():
                _lines(picture, ax, colours)
            case Bars():
                _bars(picture, ax, colours)
            case HeatMap():
                _heat_map(picture, ax)
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def _labels(picture: Picture) -> list[str]:
    match picture:
        case Chart():
            return [line.label for line in picture.lines]
        case Bars():
            return list(picture.values)
        case HeatMap():
            return []


def _lines(chart: Chart, ax: Axes, colours: Mapping[str, str]) -> None:
    from matplotlib import ticker

    for line in chart.lines:
        marker = None if line.dashed or len(line.xs) > 32 else "."
        style = "none" if not line.joined else "--" if line.dashed else "-"
        ax.plot(line.xs, line.ys, linestyle=style, marker=marker, label=line.label, color=colours[line.label])
    if chart.log_x:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(ticker.ScalarFormatter())
    if chart.log_y:
        ax.set_yscale("log")
    ax.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    ax.grid(alpha=0.3)
    if chart.lines:
        ax.legend(fontsize="small")


def _bars(bars: Bars, ax: Axes, colours: Mapping[str, str]) -> None:
    width = 0.8 / max(1, len(bars.values))
    for i, (label, values) in enumerate(bars.values.items()):
        at = [group + (i + 0.5) * width - 0.4 for group in range(len(bars.groups))]
        ax.bar(at, [float("nan") if value is None else value for value in values], width, label=label, color=colours[label])
    ax.set_xticks(range(len(bars.groups)), bars.groups, rotation=30, ha="right", fontsize="small")
    ax.set(title=bars.title, ylabel=bars.y_label)
    ax.grid(alpha=0.3, axis="y")
    if bars.values:
        ax.set_ylim(top=1.25 * ax.get_ylim()[1])
        ax.legend(fontsize="small", loc="upper center", ncols=3)


def _heat_map(heat: HeatMap, ax: Axes) -> None:
    cells = [[float("nan") if value is None else value for value in row] for row in heat.values]
    if cells:
        ax.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for y, row in enumerate(heat.values):
        for x, value in enumerate(row):
            ax.text(x, y, "" if value is None else f"{value:.2f}", ha="center", va="center", fontsize="small")
    ax.set_xticks(range(len(heat.columns)), heat.columns)
    ax.set_yticks(range(len(heat.rows)), heat.rows)
    ax.set(title=heat.title, xlabel=heat.x_label, ylabel=heat.y_label)
