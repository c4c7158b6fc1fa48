"""The measurement of one model by all engines, in alternation."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from driver import DriverFailed
from engines import Engine
from results import ModelResult, StepTime
from rounds import BATCHES, CELLS, Cell, alternation

T = TypeVar("T")

PROMPT, EXPECTED = "The days of the week are Monday, Tuesday, Wednesday,", "Thursday, Friday"


class Asked(Protocol):
    """What is needed of a fleet."""

    ready: dict[str, float]

    def ask(self, engine: Engine, do: str, **given: Any) -> Any: ...


class Contest:
    """The measurement of one model. `result` grows as it goes; an engine that fails is left out from there on, with the reason."""

    def __init__(self, fleet: Asked, result: ModelResult, engines: list[Engine], rounds: int) -> None:
        self._fleet = fleet
        self.result = result
        self._engines = engines
        self._rounds = rounds

    def check(self) -> None:
        """Have each engine say something, so that none is measured on garbage."""
        for engine in self._engines:
            if not engine.installed:
                self.result.absent[engine.name] = f"not installed on this machine (`python bench/peers/install.py {engine.name}`)"
                continue
            self._try(engine, lambda engine=engine: self._listen(engine))
            why = self.result.absent.get(engine.name)
            ready = self._fleet.ready.get(engine.name, 0.0)
            print(f"  {engine.name}: {why or f'ready in {ready:.1f} s, says {self.result.said[engine.name]!r}'}", flush=True)
        self.result.ready = dict(self._fleet.ready)

    def measure(self) -> None:
        """All cells, all rounds."""
        for turn, cell, engine in alternation(self._rounds, CELLS, self._engines):
            if engine.name in self.result.absent:
                continue
            seconds = self._try(engine, lambda engine=engine, cell=cell, turn=turn: self._time(engine, cell, turn))
            if seconds is None:
                print(f"  {engine.name}: {self.result.absent[engine.name]}", flush=True)
                continue
            print(f"  round {turn}  {cell.label:12} {engine.name:16} {cell.tokens / seconds:9.1f} tokens/s", flush=True)
            if turn:
                self.result.seconds.setdefault(cell.label, {}).setdefault(engine.name, []).append(seconds)

    def measure_steps(self, ours: Engine, floor: Callable[[Cell], float]) -> None:
        """tokenmill's step time against batch size."""
        if ours.name in self.result.absent:
            return
        seconds: dict[int, list[float]] = {}
        for turn, cell, engine in alternation(min(self._rounds, 3), BATCHES, [ours]):
            spent = self._time(engine, cell, turn)
            if turn:
                seconds.setdefault(cell.streams, []).append(spent)
        self.result.steps = [StepTime(streams=cell.streams, seconds=seconds[cell.streams], floor=floor(cell)) for cell in BATCHES]
        print("  steps: " + ", ".join(f"{n} streams {1e3 * statistics.median(s):.1f} ms" for n, s in seconds.items()), flush=True)

    def _listen(self, engine: Engine) -> None:
        said: str = self._fleet.ask(engine, "complete", prompt=PROMPT, tokens=16)
        self.result.said[engine.name] = said
        if EXPECTED not in said:
            raise DriverFailed(f"goes on with {PROMPT!r} by {said!r}, without {EXPECTED!r}: its figures would be of garbage")

    def _time(self, engine: Engine, cell: Cell, turn: int) -> float:
        prompts = cell.prompts(turn)
        if cell.streams:
            return float(self._fleet.ask(engine, "decode", prompts=prompts, steps=cell.steps))
        return float(self._fleet.ask(engine, "prefill", prompt=prompts[0]))

    def _try(self, engine: Engine, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except DriverFailed as failure:
            self.result.absent[engine.name] = str(failure)
            return None
