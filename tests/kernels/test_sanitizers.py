"""The native sources under sanitizers, and what their object files export."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
FLAGS = {
    "portable": "-Wno-psabi",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16",
}
X86 = platform.machine() in ("x86_64", "AMD64")
VARIANTS = list(FLAGS) if X86 else ["portable"]

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]


def compile_object(source: Path, to: Path, flags: str) -> Path:
    standard = f"g++ -std=c++20 -ffp-contract=off -fno-math-errno -I{NATIVE / 'include'}"
    subprocess.run([*standard.split(), *flags.split(), "-c", str(source), "-o", str(to)], check=True)
    return to


def run_driver(folder: Path, flags: str, options: dict[str, str], name: str = "sanitize.cpp") -> None:
    flags = f"-O1 -g1 {flags} -Dmmap=guarded_mmap -Dmunmap=guarded_munmap"
    core = ("memory", "pool", "pack", "step", "tape", "sample", "verify", "variants")
    objects = [compile_object(NATIVE / f"src/{n}.cpp", folder / f"{n}.o", flags) for n in core]
    objects += [compile_object(NATIVE / f"src/{v}/kernels.cpp", folder / f"{v}.o", f"{flags} {FLAGS[v]}") for v in VARIANTS]
    objects.append(compile_object(Path(__file__).with_name(name), folder / "driver.o", flags))
    driver = folder / "driver"
    subprocess.run(["g++", *flags.split(), *map(str, objects), "-o", str(driver), "-pthread"], check=True)
    # sanitizers need their shadow memory where address randomisation may put a library
    command = ["setarch", "-R", str(driver)] if shutil.which("setarch") else [str(driver)]
    done = subprocess.run(command, env=os.environ | options, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
    assert done.stdout == "done\n"


DRIVERS = pytest.mark.parametrize("name", ["sanitize.cpp", "sanitize_sampling.cpp"])


@DRIVERS
def test_no_byte_out_of_bounds_and_no_undefined_behaviour(tmp_path, name):
    run_driver(tmp_path, "-fsanitize=address,undefined -fno-sanitize-recover=all", {"UBSAN_OPTIONS": "print_stacktrace=1"}, name)


def test_a_step_like_an_earlier_one_takes_nothing_from_the_heap(tmp_path):
    run_driver(tmp_path, "-DCOUNT_ALLOCATIONS", {})


@DRIVERS
def test_threads_do_not_race(tmp_path, name):
    run_driver(tmp_path, "-fsanitize=thread", {"TSAN_OPTIONS": "halt_on_error=1"}, name)


@pytest.mark.skipif(not X86, reason="the other variants are for x86-64")
@pytest.mark.parametrize("optimise", ["-O0", "-O3"])
@pytest.mark.parametrize("variant", ["avx2", "avx512"])
def test_a_variant_exports_its_table_and_nothing_that_could_replace_baseline_code(tmp_path, variant, optimise):
    """Weak symbols (inline functions, templates) of one object file stand in for those of all others when linked.

    Without optimisation too: what is inlined is then not the compiler's choice.
    """
    compiled = compile_object(NATIVE / f"src/{variant}/kernels.cpp", tmp_path / "kernels.o", f"{optimise} -fPIC {FLAGS[variant]}")
    command = ["nm", "--demangle", "--defined-only", "--extern-only", str(compiled)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True)
    symbols = [line.split(maxsplit=2)[1:] for line in listing.stdout.splitlines()]
    assert symbols == [["T", f"mill::{variant}_kernels()"]]
