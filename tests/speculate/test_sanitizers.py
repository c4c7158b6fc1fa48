"""The suffix index under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_no_byte_out_of_bounds_and_no_undefined_behaviour(tmp_path):
    flags = f"-std=c++20 -O1 -g1 -D_GLIBCXX_ASSERTIONS -fsanitize=address,undefined -fno-sanitize-recover=all -I{NATIVE / 'include'}"
    sources = [str(NATIVE / "src/suffix.cpp"), str(Path(__file__).with_name("sanitize.cpp"))]
    driver = str(tmp_path / "driver")
    subprocess.run(["g++", *flags.split(), *sources, "-o", driver], check=True)
    # sanitizers need their shadow memory where address randomisation may put a library
    command = ["setarch", "-R", driver] if shutil.which("setarch") else [driver]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
    assert done.stdout == "done\n"
