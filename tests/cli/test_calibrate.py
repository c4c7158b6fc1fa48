from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.engine.loading import model_digest
from tokenmill.models.calibration import read_calibration

RUN = "from tokenmill.cli.main import main; main()"


def calibrate(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, "calibrate", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def path(smollm2_path: Path, tmp_path: Path) -> Path:
    path = tmp_path / "smol.gguf"
    path.symlink_to(smollm2_path)
    return path


def test_calibrate_replaces_what_was_there_and_says_what_it_found(path: Path) -> None:
    stored = path.with_suffix(".calibration")
    stored.write_text("of another model")
    result = calibrate(path, "--json")
    assert result.returncode == 0, result.stderr
    assert "calibrating: 100%" in result.stderr
    report = json.loads(result.stdout)
    assert (report["path"], report["layers"], report["kv_heads"], report["head_dim"]) == (str(stored), 30, 3, 64)
    found = read_calibration(stored, model_digest(path), (30, 3, 64))
    assert found.digest == report["digest"]
    assert [(h["layer"], h["head"]) for h in report["retrieval"]] == found.ranked()


def test_a_folder_that_cannot_be_written_is_an_error_in_a_line_before_anything_is_measured(path: Path) -> None:
    path.with_suffix(".calibration").mkdir()
    result = calibrate(path)
    assert result.returncode == 1
    assert "smol.calibration cannot be written: Is a directory: make its folder writable, or link to the model from" in result.stderr
    assert len(result.stderr.splitlines()) == 1, "something was measured, or there is a traceback"
