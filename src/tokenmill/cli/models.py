"""`tokenmill models`"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tokenmill.weights.catalogue import Catalogue, ModelStatus
from tokenmill.weights.progress import format_size


def command(as_json: Annotated[bool, typer.Option("--json", help="One JSON array; sizes in bytes.")] = False) -> None:
    """List the known models and those in the cache."""
    models = Catalogue().models()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(models)).decode())
        return
    rows = [("NAME", "SIZE", "STATE", "LICENCE", "ABOUT"), *(_row(model) for model in models)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(model: ModelStatus) -> tuple[str, str, str, str, str]:
    state = f"{100 * model.bytes_here // model.size}%" if model.state == "partial" and model.size else model.state
    return model.name, format_size(model.size), state, model.licence, model.about
