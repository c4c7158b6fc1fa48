"""Charts as PNG files. What is drawn is plain data; only drawing loads matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.core.errors import ConfigError


@dataclass(frozen=True)
class Line:
    """dashed: a bound, not a measurement."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines in one pair of axes, which are logarithmic (to base 2 for x, 10 for y) if asked."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


def require_matplotlib() -> None:
    """Raise `ConfigError` saying how to install it, before anything is measured in vain."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'tokenmill[plot]'", param="plot")


def draw(charts: Sequence[Chart], path: Path) -> None:
    """Write the charts side by side into one PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, len(charts), figsize=(7 * len(charts), 5), squeeze=False, layout="constrained")
    for chart, ax in zip(charts, axes[0], strict=True):
        for line in chart.lines:
            marker = None if line.dashed or len(line.xs) > 32 else "."
            ax.plot(line.xs, line.ys, linestyle="--" if line.dashed else "-", marker=marker, label=line.label)
        if chart.log_x:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(ticker.ScalarFormatter())
        if chart.log_y:
            ax.set_yscale("log")
        ax.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        ax.grid(alpha=0.3)
        if chart.lines:
            ax.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)
