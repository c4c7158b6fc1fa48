"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(cells: Sequence[Sequence[str]], words: Sequence[bool]) -> list[str]:
    """A line for each row of cells. words: by column, whether it stands to the left, as words do, or to the right, as numbers do."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if left else cell.rjust(width) for cell, width, left in zip(line, widths, words, strict=True))
        for line in cells
    ]
    return [line.rstrip() for line in lines]
