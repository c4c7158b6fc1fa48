from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.measure.plot import Chart, Line, draw, require_matplotlib


def test_charts_become_a_png(tmp_path: Path) -> None:
    lines = [Line("line", [1, 2, 4], [1.0, 3.0, 9.0]), Line("bound", [1, 4], [5, 5], dashed=True)]
    draw([Chart("a", "x", "y", lines, log_x=True, log_y=True), Chart("empty", "x", "y", [])], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tokenmill\[plot\]'"):
        require_matplotlib()
