"""Answers of variants beside the reference's: right, the same, or the same in meaning. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.measure.plot import Bars, Picture
from tokenmill.measure.quality.prompts import Task
from tokenmill.measure.quality.variants import REFERENCE
from tokenmill.measure.report import Column, Row, Table, Value

Similarity = Callable[[Sequence[tuple[str, str]]], list[float]]
"""Of each pair of texts: 1 for the same meaning, less for another."""

ANOTHER = "another prompt's"
"""The row that gives similarity a scale: the reference's answers beside its answers to other prompts of the kind."""


@dataclass(frozen=True)
class Answer:
    """What a variant answered."""

    variant: str
    task: Task
    text: str
    tokens: tuple[int, ...]
    sparsified: bool = False


def tasks_table() -> Table:
    columns = (
        Column("kind", "kind"),
        Column("variant", "KV"),
        Column("prompts", "prompts"),
        Column("sparsified", "sparsified"),
        Column("score", "score", 1, 3),
        Column("difference", "diff", 1, 3),
        Column("same", "same", 1, 3),
        Column("prefix", "prefix", 1, 3),
        Column("similarity", "similarity", 1, 4),
        Column("similarity_least", "least", 1, 4),
    )
    return Table("tasks", "greedy answers beside the reference's", columns)


def tasks_rows(answers: Sequence[Answer], similarity: Similarity | None) -> list[Row]:
    """By kind and variant, the reference first; of an interrupted variant the kinds that are complete.

    answers: in the same order of tasks for each variant, the reference's first.
    """
    rows: list[Row] = []
    for kind in dict.fromkeys(answer.task.kind for answer in answers):
        of_kind = [answer for answer in answers if answer.task.kind == kind]
        groups = {name: [a for a in of_kind if a.variant == name] for name in dict.fromkeys(a.variant for a in of_kind)}
        base = groups[REFERENCE.name]
        complete = {name: group for name, group in groups.items() if len(group) == len(base)}
        rows += [_row(kind, name, group, base, similarity) for name, group in complete.items()]
        if similarity is not None and len(base) > 1:
            head: Row = {"kind": kind, "variant": ANOTHER, "prompts": len(base)}
            rows.append(head | _nearness([*base[1:], base[0]], base, similarity))
    return rows


def tasks_pictures(table: Table) -> list[Picture]:
    rows = [row for row in table.rows if row["variant"] != ANOTHER]
    return [_bars("right answers", "share", rows, "score"), _bars("answers equal to the reference's", "share", rows, "same")]


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> float:
    """Share of `a` before the first token that differs from `b`; 1 of nothing."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / len(a) if a else 1.0


def _row(kind: str, name: str, group: Sequence[Answer], base: Sequence[Answer], similarity: Similarity | None) -> Row:
    score, reference = _mean_score(group), _mean_score(base)
    row: Row = {"kind": kind, "variant": name, "prompts": len(group), "sparsified": sum(a.sparsified for a in group), "score": score}
    if name == REFERENCE.name:
        return row | dict.fromkeys(("difference", "same", "prefix", "similarity", "similarity_least"))
    row["difference"] = None if score is None or reference is None else score - reference
    row["same"] = _mean([float(a.tokens == b.tokens) for a, b in zip(group, base, strict=True)])
    row["prefix"] = _mean([shared_prefix(b.tokens, a.tokens) for a, b in zip(group, base, strict=True)])
    return row | _nearness(group, base, similarity)


def _nearness(group: Sequence[Answer], base: Sequence[Answer], similarity: Similarity | None) -> Row:
    if similarity is None:
        return {"similarity": None, "similarity_least": None}
    values = similarity([(a.text, b.text) for a, b in zip(group, base, strict=True)])
    return {"similarity": _mean(values), "similarity_least": min(values)}


def _mean_score(answers: Sequence[Answer]) -> float | None:
    scores = [a.task.score(a.text) for a in answers]
    known = [score for score in scores if score is not None]
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _bars(title: str, label: str, rows: Sequence[Row], key: str) -> Bars:
    shown = [row for row in rows if row.get(key) is not None]
    kinds, variants = (list(dict.fromkeys(str(row[name]) for row in shown)) for name in ("kind", "variant"))
    found: dict[tuple[Value, Value], float] = {(row["kind"], row["variant"]): float(row[key] or 0) for row in shown}
    return Bars(title, label, kinds, {variant: [found.get((kind, variant)) for kind in kinds] for variant in variants})
