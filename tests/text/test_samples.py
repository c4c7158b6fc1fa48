from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.text.samples import calibration_texts, evaluation_texts

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
