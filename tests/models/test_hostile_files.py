"""No damaged file does worse than an error, from the loader to the first steps, in a process that would show a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hostile
import pytest

from tokenmill.engine.build import CHECK_VARIABLE


def run(folder: Path, first: int, last: int) -> None:
    command = [sys.executable, "-W", "ignore", hostile.__file__, str(folder), str(first), str(last)]
    environment = {**os.environ, CHECK_VARIABLE: "1", "TOKENMILL_HOME": str(folder / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    number = (folder / "number").read_text()
    assert done.returncode == 0, f"file {number} ended the process with {done.returncode}:\n{done.stderr}"
    assert "'served'" in done.stdout, f"every file was refused, so that no step was tried: {done.stdout}"


@pytest.mark.parametrize("architecture", hostile.ARCHITECTURES)
def test_the_undamaged_files_are_served(tmp_path, monkeypatch, architecture):
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    (tmp_path / "file.gguf").write_bytes(hostile.whole(tmp_path, architecture, "Q4_0"))
    assert hostile.serve(tmp_path / "file.gguf") == "served"


def test_a_damaged_file_is_served_or_refused(tmp_path):
    run(tmp_path, 0, 400)


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_ten_thousand_damaged_files_are_served_or_refused(tmp_path, first):
    run(tmp_path, first, first + 1000)
