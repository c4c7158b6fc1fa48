"""The comparison finds faults of the native code: each is compiled into a copy of it, and a small search must see a difference."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tokenmill.weights.catalogue import resolve

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]

SMOL, GEMMA = "smollm2:135m", "gemma3:270m"


@dataclass(frozen=True)
class Change:
    """Text that some file under native/ holds once, and what takes its place. White space is any white space."""

    old: str
    new: str

    def apply(self, sources: dict[Path, str]) -> None:
        pattern = re.compile(r"\s+".join(re.escape(word) for word in self.old.split()))
        places = [(path, found) for path, text in sources.items() for found in pattern.finditer(text)]
        assert len(places) == 1, f"{self.old!r} is {len(places)} times under native/: bring this test up to date"
        path, found = places[0]
        sources[path] = found.string[: found.start()] + self.new + found.string[found.end() :]


def merging(order: str) -> Change:
    """Decode merges its partial results in this order."""
    loop = "for (int c = 0; c < item.cut; ++c) { const size_t partial = item.partial + "
    return Change(loop + "c;", f"{loop}({order});")


FAULTS: dict[str, tuple[str, list[Change]]] = {
    "decode merges cuts from the last to the first": (SMOL, [merging("item.cut - 1 - c")]),
    "the order of merging depends on threads": (
        SMOL,
        [
            Change("struct ThreadScratch {", "struct ThreadScratch {\nbool alone = true;"),
            Change("for (auto& s : scratch_) {", "for (auto& s : scratch_) {\ns.alone = pool_->threads() == 1;"),
            merging("scratch.alone ? c : item.cut - 1 - c"),
            Change("item, at.rows, c, scratch", "item, at.rows, scratch.alone ? c : lo / kCut + (hi - 1) / kCut - c, scratch"),
        ],
    ),
    "few rows add their outliers from the last to the first": (
        SMOL,
        [
            Change(
                "for (int i = 0; i < tile.slots; ++i, ++at, ++x)",
                "const int step = R < 3 ? -1 : 1; if (step < 0) { at += tile.slots - 1; x += tile.slots - 1; }"
                "for (int i = 0; i < tile.slots; ++i, at += step, x += step)",
            )
        ],
    ),
    "a row sees the next position of its frame": (
        SMOL,
        [Change("window), position + 1};", "window), position + 1 + (position % 8 != 7)};")],
    ),
    "the window is one short where cuts are split": (
        GEMMA,
        [
            Change("first_visible(position, window), position + 1", "first_visible(position + (item.cut >= 0), window), position + 1"),
        ],
    ),
    "which lanes are added depends on the block of rows": (
        GEMMA,
        [
            Change(
                "sum = f_add(sum, store_bf16(&t.p[r][i], p));",
                "float straight[16], turned[16]; f_store(straight, store_bf16(&t.p[r][i], p));"
                "for (int l = 0; l < 16; ++l) turned[l] = straight[l ^ (l > 7 && to % 2)]; "
                "sum = f_add(sum, f_load(turned));",
            )
        ],
    ),
}


class Builder:
    """A copy of the native sources with its build folder."""

    def __init__(self, folder: Path) -> None:
        source, self._build = folder / "source", folder / "build"
        shutil.copytree(ROOT / "native", source / "native")
        shutil.copy(ROOT / "CMakeLists.txt", source)
        self._sources = {path: path.read_text() for path in source.rglob("native/**/*.*")}
        _run("cmake", "-S", str(source), "-B", str(self._build), "-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}")

    def build(self, changes: list[Change]) -> Path:
        """The library with these changes."""
        changed = dict(self._sources)
        for change in changes:
            change.apply(changed)
        for path, text in changed.items():
            if path.read_text() != text:
                path.write_text(text)
        _run("cmake", "--build", str(self._build), "--parallel", "2")
        return next(self._build.glob("_native.*"))


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    if shutil.which("cmake") is None or importlib.util.find_spec("nanobind") is None:
        pytest.skip("building the native library needs cmake and nanobind")
    return Builder(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("model", [SMOL, GEMMA])
def test_the_code_as_it_is_shows_no_difference(builder: Builder, model: str) -> None:
    found = search(builder.build([]), model)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_native_code_is_found(builder: Builder, name: str) -> None:
    model, changes = FAULTS[name]
    found = search(builder.build(changes), model)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "cases differ" in found.stdout


def search(library: Path, model: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name("mutant.py")), str(library), str(resolve(model)), "5", "6", "7"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
