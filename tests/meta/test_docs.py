"""docs/cli.md and docs/python-api.md name everything that there is."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import typer.main

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.cli.main import COMMANDS
from tokenmill.cli.run import Report, Timings, Usage
from tokenmill.core.config import BlockManagerConfig, CompressionConfig, EngineConfig, KVCacheConfig, KVTransferConfig
from tokenmill.llm import outputs
from tokenmill.measure import report as measure
from tokenmill.measure.machine import Machine

DOCS = Path(__file__).parents[2] / "docs"
CLI = (DOCS / "cli.md").read_text()
API = (DOCS / "python-api.md").read_text()


def named(page: str) -> set[str]:
    """What stands in backticks outside code blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)))


def all_commands() -> dict[str, str]:
    """Every command with its line; those of a group come after it, as `bench kernels`."""
    found: dict[str, str] = {}
    for name, line in COMMANDS.items():
        group = getattr(importlib.import_module(f"tokenmill.cli.{name}"), "COMMANDS", {})
        found |= {name: line} | {f"{name} {inner}": text for inner, text in group.items()}
    return found


def table(name: str) -> str:
    """The arguments and options of a command, as docs/cli.md lists them; of a group, its commands."""
    module = importlib.import_module(f"tokenmill.cli.{name.replace(' ', '.')}")
    if hasattr(module, "COMMANDS"):
        return "\n".join(["| command | |", "|---|---|", *(f"| `{inner}` | {line} |" for inner, line in module.COMMANDS.items())])
    single = typer.Typer(add_completion=False)
    single.command(name)(module.command)
    rows = [_row(parameter) for parameter in typer.main.get_command(single).params if parameter.name != "help"]
    return "\n".join(["| option | | default |", "|---|---|---|", *rows])


def _row(parameter: Any) -> str:
    shown = parameter.name.upper() if parameter.param_type_name == "argument" else " ".join(parameter.opts)
    default = "" if parameter.default is None or parameter.default is False or parameter.required else f"`{parameter.default}`"
    return f"| `{shown}` | {parameter.help} | {default} |"


@pytest.mark.parametrize("name", all_commands())
def test_every_command_is_documented_with_all_its_options(name: str) -> None:
    heading = f"## tokenmill {name}\n\n{all_commands()[name]}\n"
    assert heading in CLI
    section = CLI.partition(heading)[2].partition("\n## ")[0]
    assert table(name) in section, f"docs/cli.md must have this table under {name}:\n{table(name)}"


def test_no_command_is_documented_that_does_not_exist() -> None:
    assert re.findall(r"^## tokenmill (.+)$", CLI, re.MULTILINE) == list(all_commands())


@pytest.mark.parametrize("struct", [Report, Usage, Timings])
def test_every_field_of_runs_json_is_documented(struct: type[msgspec.Struct]) -> None:
    assert {field.name for field in msgspec.structs.fields(struct)} <= named(CLI)


@pytest.mark.parametrize("struct", [measure.Report, measure.Ceilings, Machine])
def test_every_field_of_a_benchmarks_json_is_documented(struct: type[msgspec.Struct]) -> None:
    assert {field.name for field in msgspec.structs.fields(struct)} <= named((DOCS / "benchmarking.md").read_text())


@pytest.mark.parametrize("struct", [EngineConfig, BlockManagerConfig, KVCacheConfig, CompressionConfig, SamplingParams])
def test_every_setting_is_documented(struct: type[msgspec.Struct]) -> None:
    assert {field.name for field in msgspec.structs.fields(struct)} <= named(API)


def test_every_setting_of_hand_overs_is_documented() -> None:
    assert {field.name for field in msgspec.structs.fields(KVTransferConfig)} <= named((DOCS / "pd.md").read_text())


@pytest.mark.parametrize("kind", [outputs.RequestOutput, outputs.CompletionOutput, outputs.Usage, outputs.RequestMetrics])
def test_every_field_of_a_result_is_documented(kind: Any) -> None:
    assert {field.name for field in dataclasses.fields(kind)} <= named(API)


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", API, flags=re.DOTALL))
def test_every_example_of_the_python_api_runs(example: str, smollm2_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_every_public_name_of_an_llm_is_documented(kind: type) -> None:
    public = {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")} | {"info"}
    assert public <= named(API)
