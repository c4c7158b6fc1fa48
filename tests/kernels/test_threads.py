"""The pool's threads: how they share a CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_thread_that_shares_its_cpu_gives_way_between_runs_and_one_that_does_not_keeps_it(tmp_path: Path) -> None:
    source, driver = Path(__file__).with_name("turn.cpp"), tmp_path / "turn"
    include = Path(__file__).parents[2] / "native" / "src"
    subprocess.run(["g++", "-std=c++20", f"-I{include}", str(source), "-o", str(driver)], check=True)
    done = subprocess.run([str(driver)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
