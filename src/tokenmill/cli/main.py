"""The `tokenmill` command. Only the chosen command's module is imported, so that help and version are instant."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from tokenmill import __version__
from tokenmill.core.errors import TokenmillError

COMMANDS = {
    "run": "Answer one prompt on standard output.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Serve one or several models over an OpenAI-compatible API.",
    "worker": "Serve a gateway on another host as one of its workers.",
    "workers": "See, migrate from, or remove the workers of a server.",
    "pull": "Fetch a model into the cache and print its path.",
    "models": "List the known models and those in the cache.",
    "rm": "Delete a model from the cache.",
    "bench": "Measure kernels, engine and servers, with floors and ratios.",
    "calibrate": "Measure the range of a model's keys and which heads look far back.",
    "eval": "Measure what a KV format costs in the quality of answers.",
}
"""Every command and its help line. `tokenmill.cli.<name>` has the function `command` whose docstring begins with that line, or,
for a group of commands, such a table of its own."""


class LazyCommand(typer.core.TyperCommand):
    """Stands for a command in the help; becomes the real one when it is parsed."""

    def __init__(self, module: str, line: str) -> None:
        super().__init__(module.rpartition(".")[2], help=line)
        self._module = module

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._real().make_context(info_name, args, parent=parent, **extra)

    def _real(self) -> Any:
        module = importlib.import_module(self._module)
        if hasattr(module, "COMMANDS"):
            return LazyGroup(name=self.name, help=self.help, no_args_is_help=True, package=self._module, table=module.COMMANDS)
        single = typer.Typer(add_completion=False)
        single.command(self.name)(module.command)
        return typer.main.get_command(single)


class LazyGroup(typer.core.TyperGroup):
    """All commands of a table, unimported."""

    def __init__(self, package: str = "tokenmill.cli", table: dict[str, str] = COMMANDS, **settings: Any) -> None:
        super().__init__(**settings)
        for name, line in table.items():
            self.add_command(LazyCommand(f"{package}.{name}", line))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tokenmill {__version__}")
        raise typer.Exit


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """An LLM inference engine and server: one model, one command, the same answer every time."""


def main() -> None:
    """Run the command line: exit status 1 and a message for errors of the caller, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        app(prog_name="tokenmill")
    except TokenmillError as error:
        sys.exit(f"tokenmill: {error}")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        # What standard output still holds would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(f"tokenmill: the output could not be written: {error.strerror}")
