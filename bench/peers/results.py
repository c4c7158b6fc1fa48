"""What a run found, as it is kept in a JSON file. Times are seconds."""

from __future__ import annotations

from pathlib import Path

import msgspec


class StepTime(msgspec.Struct, kw_only=True):
    """tokenmill's decode step at one batch size. seconds: of each round; floor: seconds too."""

    streams: int
    seconds: list[float]
    floor: float


class ModelResult(msgspec.Struct, kw_only=True):
    """size: bytes. floors: tokens per second by cell label. seconds: by cell label, engine and round. said: how each engine went on with
    the fixed prompt. ready: seconds to load. absent: why an engine has no figures, or not all."""

    name: str
    file: str
    size: int
    floors: dict[str, float]
    seconds: dict[str, dict[str, list[float]]]
    said: dict[str, str] = {}
    ready: dict[str, float] = {}
    absent: dict[str, str] = {}
    steps: list[StepTime] = []


class Results(msgspec.Struct, kw_only=True):
    """One run. bandwidth: bytes per second; int8, bf16: operations per second."""

    date: str
    command: str
    rounds: int
    threads: int
    machine: dict[str, str]
    bandwidth: float
    int8: float
    bf16: float
    versions: dict[str, str] = {}
    models: list[ModelResult] = []

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        return msgspec.json.decode(path.read_bytes(), type=cls)
