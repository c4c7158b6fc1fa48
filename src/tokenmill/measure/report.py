"""What a benchmark reports: tables for people, the same rows as JSON for programs. Pure but for `Report.begin`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from tokenmill import __version__
from tokenmill.measure.machine import Machine
from tokenmill.observe.text_table import aligned

Value = str | bool | int | float | None
Row = dict[str, Value]


@dataclass(frozen=True)
class Column:
    """A row's value `key` under the heading `label`; numbers are divided by `unit` and shown with `digits` decimals."""

    key: str
    label: str
    unit: float = 1.0
    digits: int = 0

    def show(self, value: Value) -> str:
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        return f"{value / self.unit:.{self.digits}f}"


@dataclass
class Table:
    """name: its key in the JSON. Rows hold plain SI units: seconds, bytes, operations, and rates of them per second."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: list[Row] = field(default_factory=list)

    def render(self) -> str:
        """Aligned text: words to the left, numbers to the right."""
        cells = [[column.label for column in self.columns]]
        cells += [[column.show(row.get(column.key)) for column in self.columns] for row in self.rows]
        left = [any(isinstance(row.get(column.key), str) for row in self.rows) for column in self.columns]
        return "\n".join([self.title, *aligned(cells, left)])


class Ceilings(msgspec.Struct, frozen=True):
    """What this machine can do at best, with all threads: bytes read from memory, operations on int8 and bf16, each per second."""

    read: float
    int8: float
    bf16: float

    def floor(self, read: float = 0.0, int8: float = 0.0, bf16: float = 0.0) -> float:
        """Seconds below which that many bytes and operations cannot be done: reading may hide behind computing."""
        return max(read / self.read, int8 / self.int8 + bf16 / self.bf16)


class Report(msgspec.Struct, kw_only=True, omit_defaults=False):
    """A benchmark's result, as `--json` writes it. tables: rows by the table's name; see docs/benchmarking.md.

    family: the command it belongs to, `bench` or `eval`.
    """

    family: str = "bench"
    benchmark: str
    command: list[str]
    version: str
    started: str
    machine: Machine
    settings: dict[str, Value | list[int]]
    model: str | None = None
    url: str | None = None
    kernels: str | None = None
    threads: int | None = None
    cpus: str | None = None
    ceilings: Ceilings | None = None
    interrupted: bool = False
    tables: dict[str, list[Row]] = {}

    @classmethod
    def begin(cls, benchmark: str, command: list[str], settings: dict[str, Value | list[int]], family: str = "bench") -> Report:
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(
            family=family,
            benchmark=benchmark,
            command=command,
            version=__version__,
            started=started,
            machine=Machine.here(),
            settings=settings,
            tables={},
        )

    def heading(self) -> str:
        """The facts above the tables."""
        machine = self.machine
        what = " at ".join(part for part in (self.model, self.url) if part) or "random weights"
        lines = [f"tokenmill {self.version} {self.family} {self.benchmark}: {what}"]
        where = f" on CPUs {self.cpus}" if self.cpus else ""
        compute = "" if self.threads is None else f"; {self.threads} threads{where}, {self.kernels} kernels"
        lines.append(f"{machine.cpu}, {machine.cpus} CPUs, {machine.memory / 2**30:.0f} GiB{compute}")
        if self.ceilings is not None:
            c = self.ceilings
            lines.append(f"ceilings: reads {c.read / 1e9:.1f} GB/s, int8 {c.int8 / 1e9:.0f} GOPS, bf16 {c.bf16 / 1e9:.0f} GFLOPS")
        return "\n".join(lines)


Tell = Callable[[str], None]
"""Says what is being measured, while it is."""


def by_key(rows: Iterable[Row], key: str) -> dict[Value, list[Row]]:
    """Rows grouped by a value, in order of first appearance."""
    groups: dict[Value, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups
