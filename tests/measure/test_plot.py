from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.measure.plot import Bars, Chart, HeatMap, Line, Picture, draw, require_matplotlib


def test_charts_become_a_png(tmp_path: Path) -> None:
    lines = [Line("line", [1, 2, 4], [1.0, 3.0, 9.0]), Line("bound", [1, 4], [5, 5], dashed=True)]
    draw([Chart("a", "x", "y", lines, log_x=True, log_y=True), Chart("empty", "x", "y", [])], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "pictures",
    [
        [Bars("a", "y", ["one", "two"], {"x": [1.0, None], "z": [2.0, 3.0]}), Bars("empty", "y", [], {})],
        [HeatMap("a", "x", "y", ["1", "2"], ["3"], [[0.5, None]]), HeatMap("empty", "x", "y", [], [], [])],
        [],
    ],
)
def test_bars_and_maps_may_have_gaps_or_nothing(pictures: list[Picture], tmp_path: Path) -> None:
    draw(pictures, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tokenmill\[plot\]'"):
        require_matplotlib()
