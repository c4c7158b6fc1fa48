from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.measure.quality.texts import calibration_texts, evaluation_texts
from tokenmill.measure.quality.windows import cut_windows

PASSAGE = 24
"""Words; the lists of types that many topics have are shorter."""


def passages(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + PASSAGE]) for i in range(len(words) - PASSAGE + 1)}


def test_calibration_and_evaluation_have_no_passage_in_common() -> None:
    evaluation = set().union(*map(passages, evaluation_texts().values()))
    calibration = set().union(*map(passages, calibration_texts().values()))
    assert evaluation.isdisjoint(calibration)


def test_there_is_text_enough_for_both() -> None:
    assert all(len(text) > 200_000 for text in evaluation_texts().values())
    assert all(len(text) > 100_000 for text in calibration_texts().values())
    assert set(evaluation_texts()) == set(calibration_texts()) == {"english", "python"}


def test_a_file_takes_the_place_of_all_texts(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("Grüße", encoding="utf-8")
    assert evaluation_texts(file) == {"own.txt": "Grüße"}
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"own\.txt cannot be read as a text"):
        evaluation_texts(file)


def test_windows_lie_over_the_whole_text_without_overlap() -> None:
    assert cut_windows(range(20), [], 12, 4, "t") == [[0, 1, 2, 3], [6, 7, 8, 9], [12, 13, 14, 15]]
    assert cut_windows(range(20), [99], 8, 4, "t") == [[99, 0, 1, 2], [99, 10, 11, 12]]


def test_a_text_that_is_too_short_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match="the text own has 20 tokens, but 3 windows of 8 need 24"):
        cut_windows(range(20), [], 24, 8, "own")
