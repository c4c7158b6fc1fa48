"""A sentence hidden in a long text among others like it, and the question that asks for it. Pure.

After "needle in a haystack" tests, with distractors: to answer, the model must look the asked vault up; that there are codes in the
text, or where one stands, is not enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.core.errors import ConfigError
from tokenmill.measure.plot import HeatMap
from tokenmill.measure.quality.variants import REFERENCE
from tokenmill.measure.report import Column, Row, Table, Value

COLOURS = ("blue", "red", "green", "yellow", "white", "black", "silver", "golden", "purple", "orange")
DISTRACTORS = 4
APART = 0.05
"""Of the lines: how far distractors stay from the needle. To tell it from one in the next line is reading, not finding."""
INTRODUCTION = "Read this text. The access codes of some vaults are mentioned in it."
QUESTION = "What is the access code of the {} vault? Answer with the number only."
NEEDLE = "The access code of the {} vault is {}."
ANSWER_TOKENS = 16
MARGIN = 64
"""Tokens for the chat template and for lines that are a little longer together than apart."""

ALL = "all"


@dataclass(frozen=True)
class Sample:
    """One question. length: tokens of the prompt, about. depth: where the needle stands, percent of the text. blind: the same prompt
    without the needle."""

    length: int
    depth: int
    prompt: str
    blind: str
    code: str

    def is_answered_by(self, text: str) -> bool:
        """Whether the first number in the answer is the code."""
        found = re.search(r"\d+", text)
        return found is not None and found[0] == self.code


class Haystack:
    """The lines of a text and their token counts."""

    def __init__(self, text: str, count: Callable[[str], int]) -> None:
        self._lines = text.splitlines()
        self._sizes = [count(line + "\n") for line in self._lines]
        self._count = count

    def samples(self, length: int, depths: Sequence[int], rng: np.random.Generator) -> list[Sample]:
        """One stretch of the text, drawn by `rng`, with a needle at each depth, and the question for each of them: the others are its
        distractors, and more are hidden where they are few. Raises `ConfigError` if the text is too short."""
        count = max(len(depths), DISTRACTORS + 1)
        colours = rng.choice(COLOURS, count, replace=False)
        codes = rng.choice(np.arange(1000, 10000), count, replace=False)
        needles = [NEEDLE.format(colour, code) for colour, code in zip(colours, codes, strict=True)]
        questions = [QUESTION.format(colour) for colour in colours]
        spent = sum(map(self._count, [*needles, INTRODUCTION])) + max(map(self._count, questions))
        lines = self._stretch(length - MARGIN - spent, rng)
        places = [round(depth / 100 * len(lines)) for depth in depths]
        apart = [other for other in range(len(lines) + 1) if all(abs(other - place) > APART * len(lines) for place in places)]
        more = rng.choice(apart or places, count - len(depths)).tolist()
        hidden = sorted(zip([*places, *more], needles, strict=True))
        text = _insert(lines, hidden)
        return [
            Sample(length, depth, _ask(text, question), _ask(_insert(lines, [p for p in hidden if p[1] != needle]), question), str(code))
            for depth, question, needle, code in zip(depths, questions, needles, codes, strict=False)
        ]

    def _stretch(self, tokens: int, rng: np.random.Generator) -> list[str]:
        """Consecutive lines of that many tokens, from a place drawn by `rng`; the text is taken as a ring."""
        if not 0 < tokens <= sum(self._sizes):
            raise ConfigError(
                f"--lengths: a text of {tokens} tokens is wanted around the needles, but lengths must leave at least 1 and the texts "
                f"have {sum(self._sizes)}",
                param="--lengths",
            )
        at, taken = int(rng.integers(len(self._lines))), 0
        lines = []
        while (taken := taken + self._sizes[at]) <= tokens:
            lines.append(self._lines[at])
            at = (at + 1) % len(self._lines)
        return lines


def draw_samples(haystack: Haystack, lengths: Sequence[int], depths: Sequence[int], each: int, seed: int) -> list[Sample]:
    """`each` texts of every length, and a question for every depth of each: those of one text follow each other. A length's questions
    do not depend on what other lengths there are. Raises `ConfigError` for more depths than colours."""
    if len(depths) > len(COLOURS):
        raise ConfigError(
            f"--depths: {len(depths)} needles are to be hidden in a text, but there are {len(COLOURS)} colours", param="--depths"
        )
    grid = [(length, number) for length in lengths for number in range(each)]
    return [sample for length, number in grid for sample in haystack.samples(length, depths, np.random.default_rng([seed, length, number]))]


@dataclass(frozen=True)
class Result:
    """What a variant made of a question."""

    variant: str
    sample: Sample
    right: bool
    sparsified: bool = False


def needle_table(depths: Sequence[int]) -> Table:
    columns = (
        Column("variant", "KV"),
        Column("length", "length"),
        Column("questions", "questions"),
        Column("sparsified", "sparsified"),
        *(Column(f"depth_{depth}", f"at {depth}%", 1, 2) for depth in depths),
        Column("score", "score", 1, 3),
        Column("difference", "diff", 1, 3),
    )
    return Table("needle", "share of right answers by length and depth", columns)


def needle_rows(results: Sequence[Result], depths: Sequence[int]) -> list[Row]:
    """By variant and length; a variant's last row is over all lengths."""
    rows: list[Row] = []
    reference: dict[Value, float] = {}
    for variant in dict.fromkeys(result.variant for result in results):
        own = [result for result in results if result.variant == variant]
        lengths = list(dict.fromkeys(result.sample.length for result in own))
        groups: list[tuple[Value, list[Result]]] = [(n, [r for r in own if r.sample.length == n]) for n in lengths]
        for length, group in [*groups, (ALL, own)] if len(groups) > 1 else groups:
            score = _share(group)
            assert score is not None, "a group has results"
            if variant == REFERENCE.name:
                reference[length] = score
            by_depth = {f"depth_{depth}": _share([r for r in group if r.sample.depth == depth]) for depth in depths}
            difference = None if variant == REFERENCE.name else score - reference[length]
            head: Row = {"variant": variant, "length": length, "questions": len(group), "sparsified": sum(r.sparsified for r in group)}
            rows.append(head | by_depth | {"score": score, "difference": difference})
    return rows


def needle_pictures(table: Table, depths: Sequence[int]) -> list[HeatMap]:
    """A map for each variant."""
    pictures = []
    for variant in dict.fromkeys(row["variant"] for row in table.rows):
        rows = [row for row in table.rows if row["variant"] == variant and row["length"] != ALL]
        cells = [[_number(row[f"depth_{depth}"]) for row in rows] for depth in depths]
        lengths = [str(row["length"]) for row in rows]
        pictures.append(HeatMap(str(variant), "tokens", "depth", lengths, [f"{depth}%" for depth in depths], cells))
    return pictures


def _insert(lines: Sequence[str], hidden: Sequence[tuple[int, str]]) -> str:
    """hidden: (number of lines before it, sentence), ascending."""
    parts, done = [], 0
    for place, sentence in hidden:
        parts += [*lines[done:place], "", sentence, ""]
        done = place
    return "\n".join([*parts, *lines[done:]])


def _ask(text: str, question: str) -> str:
    return f"{INTRODUCTION}\n\n{text}\n\n{question}"


def _share(results: Sequence[Result]) -> float | None:
    return sum(result.right for result in results) / len(results) if results else None


def _number(value: Value) -> float | None:
    return None if value is None else float(value)
