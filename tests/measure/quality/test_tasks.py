from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tokenmill.measure.plot import draw
from tokenmill.measure.quality.prompts import ARITHMETIC, COPYING, LISTS, OPEN, SUMS, Task, all_tasks
from tokenmill.measure.quality.tasks import ANOTHER, Answer, shared_prefix, tasks_pictures, tasks_rows, tasks_table


def test_there_are_prompts_of_each_kind_and_seeds_change_the_numbers() -> None:
    tasks = all_tasks(0)
    counts = {kind: sum(task.kind == kind for task in tasks) for kind in (ARITHMETIC, COPYING, *OPEN)}
    assert counts == {ARITHMETIC: SUMS, COPYING: LISTS, "english": 8, "code": 8, "chinese": 8}
    assert tasks == all_tasks(0)
    assert {task.prompt for task in tasks} & {task.prompt for task in all_tasks(1)} == {p for prompts in OPEN.values() for p in prompts}


def test_the_right_result_of_every_sum_is_known() -> None:
    for task in all_tasks(3):
        if task.kind == ARITHMETIC:
            a, sign, b = task.prompt.removeprefix("What is ").partition("?")[0].split()
            assert task.numbers == (str(int(a) + int(b) if sign == "+" else int(a) - int(b)),)


@pytest.mark.parametrize(
    ("numbers", "answer", "score"),
    [
        (("1059",), "473 + 586 = 1,059.", 1.0),
        (("1059",), "1059 or 1060", 0.0),
        (("1059",), "I do not know", 0.0),
        (("11", "22", "33", "44"), "11, 22, 33, 44", 1.0),
        (("11", "22", "33", "44"), "11\n22\n34\n44\n55", 0.75),
        (("11", "22", "33", "44"), "22,33,44", 0.0),
        ((), "anything", None),
    ],
)
def test_numbers_are_right_in_their_place(numbers: tuple[str, ...], answer: str, score: float | None) -> None:
    assert Task("", "", 1, numbers).score(answer) == score


@pytest.mark.parametrize(
    ("a", "b", "share"), [([1, 2, 3, 4], [1, 2, 9, 4], 0.5), ([1, 2], [1, 2, 3], 1.0), ([1, 2], [], 0.0), ([], [1], 1.0)]
)
def test_a_prefix_is_what_comes_before_the_first_difference(a: list[int], b: list[int], share: float) -> None:
    assert shared_prefix(a, b) == share


def answers(variant: str, texts: Sequence[str], tasks: Sequence[Task]) -> list[Answer]:
    return [Answer(variant, task, text, tuple(map(ord, text))) for task, text in zip(tasks, texts, strict=False)]


def alike(pairs: Sequence[tuple[str, str]]) -> list[float]:
    return [1.0 if a == b else 0.25 for a, b in pairs]


def test_answers_stand_beside_the_references(tmp_path: Path) -> None:
    tasks = [Task("sum", "", 1, ("1",)), Task("sum", "", 1, ("2",)), Task("open", "", 1), Task("open", "", 1)]
    given = answers("bf16", ["1", "2", "abcd", "efgh"], tasks) + answers("int4/int4", ["1", "3", "abXd", "efgh"], tasks)
    table = tasks_table()
    table.rows = tasks_rows(given, alike)
    rows = {(row["kind"], row["variant"]): row for row in table.rows}
    assert list(rows) == [(kind, name) for kind in ("sum", "open") for name in ("bf16", "int4/int4", ANOTHER)]
    assert (rows["sum", "bf16"]["score"], rows["sum", "bf16"]["difference"]) == (1.0, None)
    assert (rows["sum", "int4/int4"]["score"], rows["sum", "int4/int4"]["difference"]) == (0.5, -0.5)
    found = rows["open", "int4/int4"]
    assert (found["score"], found["same"], found["prefix"]) == (None, 0.5, 0.75)
    assert (found["similarity"], found["similarity_least"]) == (0.625, 0.25)
    assert rows["open", ANOTHER]["similarity"] == 0.25
    draw(tasks_pictures(table), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_answers_of_which_something_was_given_up_are_counted() -> None:
    tasks = [Task("sum", "", 1, ("1",)), Task("open", "", 1), Task("open", "", 1)]
    sparse = [Answer("sparse", task, "1", (1,), task.kind == "open") for task in tasks]
    rows = tasks_rows([*answers("bf16", ["1", "1", "1"], tasks), *sparse], None)
    counts = {(row["kind"], row["variant"]): row["sparsified"] for row in rows}
    assert counts == {("sum", "bf16"): 0, ("sum", "sparse"): 0, ("open", "bf16"): 0, ("open", "sparse"): 2}


def test_without_an_embedding_model_similarity_is_left_out() -> None:
    tasks = [Task("open", "", 1), Task("open", "", 1)]
    rows = tasks_rows(answers("bf16", ["a", "b"], tasks) + answers("int4/int4", ["a", "c"], tasks), None)
    assert [(row["variant"], row["similarity"]) for row in rows] == [("bf16", None), ("int4/int4", None)]


def test_an_interrupted_variant_has_the_kinds_that_it_finished() -> None:
    tasks = [Task("sum", "", 1, ("1",)), Task("open", "", 1), Task("open", "", 1)]
    rows = tasks_rows(answers("bf16", ["1", "a", "b"], tasks) + answers("int4/int4", ["1", "a"], tasks), None)
    assert [(row["kind"], row["variant"]) for row in rows] == [("sum", "bf16"), ("sum", "int4/int4"), ("open", "bf16")]
