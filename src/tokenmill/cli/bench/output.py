"""Where a benchmark's result goes: tables on standard output, JSON, a chart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import typer

from tokenmill.cli.bench.options import note
from tokenmill.core.errors import ConfigError
from tokenmill.measure.plot import Picture, draw, require_matplotlib
from tokenmill.measure.report import Report, Table

SECRETS = ("--api-key",)


class Output:
    """Checked when it is made, so that no measurement ends with a file that cannot be written. Raises `ConfigError`."""

    def __init__(self, json: str | None, plot: Path | None) -> None:
        self._json = None if json in (None, "-") else Path(str(json))
        self._json_only = json == "-"
        self._plot = plot
        for option, file in (("--json", self._json), ("--plot", plot)):
            if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
                raise ConfigError(f"{option}: {file} cannot be written: it is a folder, or its folder does not exist", param=option)
        if plot is not None:
            if plot.suffix.lower() != ".png":
                raise ConfigError(f"--plot writes PNG, so {plot} must end in .png", param="--plot")
            require_matplotlib()

    @contextmanager
    def of(self, report: Report, tables: Callable[[], Sequence[Table]], charts: Callable[[], Sequence[Picture]]) -> Iterator[None]:
        """Measure inside; what has been measured is told at the end, and at Ctrl-C too (exit status 130)."""
        try:
            yield
        except KeyboardInterrupt:
            report.interrupted = True
        found = tables()
        report.tables = {table.name: table.rows for table in found}
        data = msgspec.json.format(msgspec.json.encode(report)).decode()
        if self._json_only:
            print(data, flush=True)
        else:
            print(report.heading(), *(table.render() for table in found), sep="\n\n", flush=True)
        if self._json is not None:
            self._json.write_text(data + "\n")
        if self._plot is not None:
            draw(charts(), self._plot)
        if report.interrupted:
            note("interrupted: this is what was measured until then")
            raise typer.Exit(130)


def command_line() -> list[str]:
    """This command, for the report, without keys."""
    words = ["tokenmill", *sys.argv[1:]]
    for i, word in enumerate(words):
        for secret in SECRETS:
            if i and words[i - 1] == secret:
                words[i] = "***"
            elif word.startswith(f"{secret}="):
                words[i] = f"{secret}=***"
    return words
