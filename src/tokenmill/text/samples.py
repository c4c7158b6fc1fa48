"""Texts that every machine with Python has, for evaluation and for calibration, with nothing in common.

English is the reference manual in `pydoc_data.topics`, Python is the standard library's own source. Both differ a little from one
Python to the next, so that figures are compared on one machine, not between two.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenmill.core.errors import ConfigError

EVALUATION_MODULES = ("argparse", "statistics", "textwrap", "fractions", "difflib", "ipaddress", "shutil", "configparser")
CALIBRATION_MODULES = ("dataclasses", "csv", "zipfile", "calendar", "pprint", "tempfile", "heapq", "inspect")

RUN = 8
"""Words in a row that are taken to occur in one place only: the manual repeats whole sections, wrapped anew, and sources their headers."""


def evaluation_texts(file: Path | None = None) -> dict[str, str]:
    """By name: `english` and `python`, or the one text of `file`. Raises `ConfigError` if there is no such text."""
    if file is not None:
        return {file.name: _read(file)}
    return {"english": "\n\n".join(_topics(0)), "python": "\n\n".join(_sources(EVALUATION_MODULES))}


def calibration_texts() -> dict[str, str]:
    """`english` and `python`: other topics and other modules, without the paragraphs that share a run of words with an evaluation text."""
    seen = {run for text in evaluation_texts().values() for run in _runs(text)}
    texts = {"english": _topics(1), "python": _sources(CALIBRATION_MODULES)}
    return {name: "\n\n".join(_unseen(parts, seen)) for name, parts in texts.items()}


def _topics(half: int) -> list[str]:
    """Every other topic of the manual, by name."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)[half::2]]


def _sources(modules: Sequence[str]) -> list[str]:
    found = [importlib.util.find_spec(name) for name in modules]
    return [_read(Path(spec.origin)) for spec in found if spec is not None and spec.origin is not None]


def _unseen(texts: Iterable[str], seen: set[tuple[str, ...]]) -> Iterator[str]:
    for text in texts:
        for paragraph in text.split("\n\n"):
            if seen.isdisjoint(_runs(paragraph)):
                yield paragraph


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    """All runs of `RUN` words."""
    words = text.split()
    return zip(*(words[i:] for i in range(RUN)), strict=False)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as a text: {error}", param="--file") from None
