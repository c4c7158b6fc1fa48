from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.measure.plot import draw
from tokenmill.measure.quality.needle import (
    DISTRACTORS,
    MARGIN,
    Haystack,
    Result,
    Sample,
    draw_samples,
    needle_pictures,
    needle_rows,
    needle_table,
)

TEXT = "\n".join(f"line {i} of a long text about nothing" for i in range(400))


def words(text: str) -> int:
    return len(text.split())


def test_questions_of_which_something_was_given_up_are_counted() -> None:
    found = [Result("sparse", Sample(length, 10, "", "", "1"), True, length > 1024) for length in (1024, 2048, 2048)]
    rows = needle_rows([*(Result("bf16", result.sample, True) for result in found), *found], [10])
    assert [(row["variant"], row["length"], row["sparsified"]) for row in rows] == [
        ("bf16", 1024, 0),
        ("bf16", 2048, 0),
        ("bf16", "all", 0),
        ("sparse", 1024, 0),
        ("sparse", 2048, 2),
        ("sparse", "all", 2),
    ]


@pytest.fixture
def haystack() -> Haystack:
    return Haystack(TEXT, words)


def test_one_vault_is_asked_for_among_others_like_it(haystack: Haystack) -> None:
    for seed in range(20):
        sample = haystack.samples(600, [50], np.random.default_rng(seed))[0]
        needles = dict(re.findall(r"The access code of the (\w+) vault is (\d{4})\.", sample.prompt))
        asked = re.search(r"What is the access code of the (\w+) vault\?", sample.prompt)
        assert asked is not None
        assert len(needles) == len(set(needles.values())) == DISTRACTORS + 1
        assert needles[asked[1]] == sample.code
        assert 600 - MARGIN - 12 <= words(sample.prompt) <= 600


def test_the_blind_prompt_lacks_the_needle_and_nothing_else(haystack: Haystack) -> None:
    sample = haystack.samples(600, [30], np.random.default_rng(1))[0]
    assert sample.code not in sample.blind
    gone = [line for line in sample.prompt.splitlines() if line not in sample.blind.splitlines()]
    assert gone == [f"The access code of the {gone[0].split()[5]} vault is {sample.code}."]


@pytest.mark.parametrize("depth", [0, 30, 100])
def test_the_needle_stands_where_it_should(haystack: Haystack, depth: int) -> None:
    sample = haystack.samples(2000, [depth], np.random.default_rng(0))[0]
    lines = [line for line in sample.prompt.splitlines() if line.startswith("line") or sample.code in line]
    place = next(i for i, line in enumerate(lines) if sample.code in line)
    assert place / (len(lines) - 1) == pytest.approx(depth / 100, abs=0.01)


def test_each_depth_of_a_text_is_asked_for_and_the_others_are_its_distractors(haystack: Haystack) -> None:
    depths = [0, 10, 20, 40, 60, 80, 100]
    samples = haystack.samples(1500, depths, np.random.default_rng(3))
    assert [sample.depth for sample in samples] == depths
    assert len({sample.code for sample in samples}) == len(depths)
    assert len({sample.prompt.rsplit("\n\n", 1)[0] for sample in samples}) == 1, "the texts differ"
    assert all(other.code in sample.blind for sample in samples for other in samples if other is not sample)


def test_more_depths_than_vaults_are_refused(haystack: Haystack) -> None:
    with pytest.raises(ConfigError, match="--depths: 11 needles"):
        draw_samples(haystack, [600], list(range(0, 110, 10)), 1, 0)


def test_the_same_seed_asks_the_same_and_a_length_does_not_depend_on_others(haystack: Haystack) -> None:
    assert draw_samples(haystack, [300, 600], [10, 90], 2, 7)[-4:] == draw_samples(haystack, [600], [10, 90], 2, 7)
    assert len({sample.prompt for sample in draw_samples(haystack, [300, 600], [10, 90], 2, 7)}) == 8
    assert draw_samples(haystack, [300], [10], 1, 7) != draw_samples(haystack, [300], [10], 1, 8)


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_length_for_which_there_is_no_text_is_refused(haystack: Haystack, length: int) -> None:
    with pytest.raises(ConfigError, match="--lengths: a text of"):
        haystack.samples(length, [50], np.random.default_rng(0))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("4817", True),
        ("The code is 4817.", True),
        (" 4817, I think, not 1234", True),
        ("1234 or 4817", False),
        ("48171", False),
        ("none", False),
    ],
)
def test_only_the_first_number_counts(answer: str, right: bool) -> None:
    assert Sample(0, 0, "", "", "4817").is_answered_by(answer) is right


def results(variant: str, right: list[bool]) -> list[Result]:
    cells = [(1024, 10), (1024, 90), (2048, 10), (2048, 90)]
    return [Result(variant, Sample(*cell, "", "", "1"), ok) for cell, ok in zip(cells, right, strict=False)]


def test_scores_stand_beside_the_references_by_length_and_depth(tmp_path: Path) -> None:
    table = needle_table([10, 90])
    table.rows = needle_rows(results("bf16", [True, True, True, False]) + results("int4/int4", [True, False, False]), [10, 90])
    shown = [(r["variant"], r["length"], r["questions"], r["depth_10"], r["depth_90"], r["score"], r["difference"]) for r in table.rows]
    assert shown == [
        ("bf16", 1024, 2, 1.0, 1.0, 1.0, None),
        ("bf16", 2048, 2, 1.0, 0.0, 0.5, None),
        ("bf16", "all", 4, 1.0, 0.5, 0.75, None),
        ("int4/int4", 1024, 2, 1.0, 0.0, 0.5, -0.5),
        ("int4/int4", 2048, 1, 0.0, None, 0.0, -0.5),
        ("int4/int4", "all", 3, 0.5, 0.0, pytest.approx(1 / 3), pytest.approx(1 / 3 - 0.75)),
    ]
    first, second = pictures = needle_pictures(table, [10, 90])
    assert (first.title, first.values) == ("bf16", [[1.0, 1.0], [1.0, 0.0]])
    assert second.values == [[1.0, 0.0], [0.0, None]]
    draw(pictures, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
