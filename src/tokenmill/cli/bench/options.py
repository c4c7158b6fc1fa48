"""The options that benchmarks share, and what they mean."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from tokenmill.core.errors import ConfigError

OptionalModel = Annotated[str | None, typer.Argument(help="A short name such as smollm2:135m, hf:org/repo[:file.gguf], or a path.")]
Url = Annotated[str | None, typer.Option(help="Instead of MODEL: any OpenAI-compatible server, such as http://127.0.0.1:8000.")]
ServedModel = Annotated[str | None, typer.Option("--model", help="What the server at --url calls the model; default: its only one.")]
ApiKey = Annotated[str | None, typer.Option(envvar="TOKENMILL_API_KEY", help="Of the server at --url.")]
Endpoint = Annotated[Literal["completions", "chat"] | None, typer.Option(help="What the server is asked for; default: completions.")]
IgnoreEos = Annotated[
    bool | None, typer.Option(help="Ask the server for answers of full length (the default); some do not know ignore_eos and refuse.")
]
Json = Annotated[
    str | None, typer.Option("--json", help="Write the result as JSON; - is standard output, instead of tables.", metavar="FILE")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the result; needs the extra `plot` to be installed.", metavar="FILE.png")]
Seed = Annotated[int, typer.Option(min=0, help="The same seed makes the same work.")]


def numbers(text: str, option: str, least: int = 1, most: int = 1 << 20) -> list[int]:
    """`1,2,4` as ascending numbers. Raises `ConfigError` naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and least <= int(part) <= most for part in parts):
        raise ConfigError(f"{option} is {text!r}, but must be numbers between {least} and {most} such as 1,4,16", param=option)
    return sorted({int(part) for part in parts})


def rates(text: str, option: str) -> list[float]:
    """`0.1,2` as ascending numbers per second. Raises `ConfigError` naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d+(\.\d+)?", part, re.ASCII) and 0 < float(part) <= 1e6 for part in parts):
        raise ConfigError(f"{option} is {text!r}, but must be numbers above 0 such as 0.1,0.5", param=option)
    return sorted({float(part) for part in parts})


def one_target(model: str | None, url: str | None) -> None:
    """Raise `ConfigError` unless there is exactly one of MODEL and --url."""
    if (model is None) == (url is None):
        raise ConfigError("give a MODEL or --url URL, not both" if model else "give a MODEL to measure it here, or --url URL of a server")


def not_part_of(what: str, **given: object) -> None:
    """Raise `ConfigError` for the first option that is given but has no part in `what`."""
    for name, value in given.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} has no part in {what}: leave it out", param=option)


def note(text: str) -> None:
    """Say what is being done, beside the result."""
    print(text, file=sys.stderr, flush=True)
