"""The table of promises: what counts as met, and that every part still measures something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import bounds
import bounds_jobs
import pytest
from bounds import Promise, Subject
from tiny_gguf import TinyModel

from tokenmill.measure.serving import Record

SCRIPT = Path(__file__).parents[2] / "bench" / "bounds.py"


def bound(figure: float, limit: float | None, at_least: bool = False) -> Promise:
    return Promise("part", "what", figure, limit, "{:.2f}", "", at_least)


def test_a_promise_is_missed_on_the_far_side_of_its_bound() -> None:
    assert [bound(figure, 2.0).missed for figure in (1.9, 2.0, 2.1)] == [False, False, True]
    assert [bound(figure, 0.7, at_least=True).missed for figure in (0.6, 0.7, 0.8)] == [True, False, False]
    assert bound(3.0, 2.0).render().split() == ["part", "what", "3.00", "<=", "2.00", "1.50", "MISSED"]
    assert bound(1.4, 0.7, at_least=True).render().split() == ["part", "what", "1.40", ">=", "0.70", "0.50", "met"]


def test_a_figure_without_a_bound_is_neither_met_nor_missed() -> None:
    assert bound(1e9, None).render().split() == ["part", "what", "1000000000.00", "-", "-"]
    assert not bound(1e9, None).missed


@pytest.mark.parametrize("model", ["smollm2:135m", "/models/smollm2-135m.gguf", "smollm2-135m.gguf"])
def test_a_model_has_its_bounds_by_name_and_by_file(model: str) -> None:
    assert bounds.START[Subject(model, Path(model), 1, 1).key] == 1.0


def test_a_rate_counts_from_first_token_to_last_and_sums_over_streams() -> None:
    records = [Record(0.0, times=[5.0, 5.5, 6.0], output_tokens=3), Record(0.0, times=[7.0, 7.1], output_tokens=2)]
    assert bounds_jobs.rate(records) == pytest.approx(2 + 10)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=120, check=False)


def test_a_part_that_does_not_exist_is_refused() -> None:
    result = run("--only", "prefill,speed")
    assert result.returncode == 2
    assert "--only: speed is none of prefill, decode, http, start, memory" in result.stderr


def test_only_the_parts_that_are_asked_for_are_printed(tmp_path: Path) -> None:
    path = TinyModel(context=16384).write(tmp_path / "tiny.gguf")
    result = run(str(path), "--only", "prefill", "--threads", "1", "--processes", "1")
    assert (result.returncode, result.stderr) == (0, "")
    heading, columns, row = result.stdout.splitlines()
    assert (heading, columns.split()) == (f"{path}, 1 threads", ["promise", "figure", "bound", "ratio"])
    assert row.startswith("prefill  a token of 8192 against 512")


def test_served_streams_starts_and_memory_are_measured(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "ROUNDS", 1)
    monkeypatch.setattr(bounds, "LOSS", {1: 0.10, 2: 0.15})
    subject = Subject(str(smollm2_path), smollm2_path, 1, 1)
    found = [promise for part in (bounds.http, bounds.start, bounds.memory) for promise in part(subject)]
    assert [promise.part for promise in found] == ["http", "http", "start", "memory"]
    one, two, start, memory = (promise.figure for promise in found)
    assert max(one, two) < 1, "of what the engine does alone, more than everything cannot be lost"
    assert start > 0.1
    assert memory > 100, "megabytes: the weights alone"
