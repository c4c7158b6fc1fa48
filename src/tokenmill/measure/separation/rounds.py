"""All setups in turn, for every demand, as often as asked. What has been measured so far can be read at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenmill.measure.report import Row, Tell
from tokenmill.measure.separation.demand import Demand
from tokenmill.measure.separation.setups import Setup
from tokenmill.measure.separation.tables import Point, point_of, setup_row, transfer_row
from tokenmill.measure.separation.turns import Turn, check_answers, take_turn
from tokenmill.measure.serving import Objective


class Rounds:
    """kernels: the workers' variant, once it is known."""

    def __init__(self, setups: Sequence[Setup], demands: Sequence[Demand], count: int, tell: Tell) -> None:
        self._setups = setups
        self._demands = demands
        self._count = count
        self._tell = tell
        self._turns: dict[Point, dict[str, list[Turn]]] = {point_of(demand): {} for demand in demands}
        self.kernels: str | None = None

    async def take(self) -> None:
        """Every turn has processes of its own; who comes first changes from round to round and from demand to demand. Raises
        `TokenmillError` where answers differ."""
        for number in range(self._count):
            for at, demand in enumerate(self._demands):
                compared: list[tuple[str, Turn]] = []
                for setup in _rotated(self._setups, number + at):
                    what = f"prompts of {demand.prompt_tokens} tokens, {demand.rate:g} per second"
                    self._tell(f"round {number + 1} of {self._count}, {what}: {setup.name}")
                    turn, info = await take_turn(setup, replace(demand, number=number))
                    self.kernels = info.kernels
                    compared.append((setup.name, turn))
                    check_answers(compared)
                    self._turns[point_of(demand)].setdefault(setup.name, []).append(turn)

    def setup_rows(self, objective: Objective) -> Iterator[Row]:
        """By demand, and then in the order in which setups were given."""
        for turns in self._turns.values():
            for setup in self._setups:
                if setup.name in turns:
                    yield setup_row(setup.name, turns[setup.name], objective)

    def transfer_rows(self) -> Iterator[Row]:
        """Of the setup that is separated, by demand."""
        for turns in self._turns.values():
            for setup in self._setups:
                if setup.separated and setup.name in turns:
                    yield transfer_row(turns[setup.name])


def _rotated(setups: Sequence[Setup], by: int) -> list[Setup]:
    at = by % len(setups)
    return [*setups[at:], *setups[:at]]
