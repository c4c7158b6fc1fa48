"""`tokenmill workers list`"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tokenmill.cli.workers import server

COLUMNS = ("name", "model", "role", "state", "pid", "threads", "kv_tokens", "running", "waiting")


def command(
    url: server.Url = server.URL,
    api_key: server.Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """List the workers of a server."""
    workers = server.ask(url, api_key, "GET", "/v1/workers")["data"]
    if as_json:
        print(json.dumps(workers, indent=2))
        return
    rows = [tuple(column.upper() for column in COLUMNS), *map(_row, workers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    return tuple("-" if worker[column] is None else str(worker[column]) for column in COLUMNS)
