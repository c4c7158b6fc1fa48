from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenmill.text.stop import StopStrings

SMALL = st.text("ab<", max_size=40)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=6), max_size=6)


def naive(strings: list[str], include: bool, text: str) -> tuple[str, bool]:
    """Look at every prefix, shortest first, for the longest stop string at its end."""
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@given(strings=STOPS, include=st.booleans(), text=SMALL, sizes=st.lists(st.integers(0, 5), max_size=20))
@example(strings=["abab", "bb"], include=False, text="aababbb", sizes=[1, 1, 1])
def test_any_cutting_gives_what_a_search_of_the_whole_gives(strings: list[str], include: bool, text: str, sizes: list[int]) -> None:
    stop = StopStrings(strings, include)
    shown, stopped = "", False
    for piece in cut(text, sizes):
        safe, stopped = stop.feed(piece)
        shown += safe
        if stopped:
            break
    assert (shown + stop.flush(), stopped) == naive(strings, include, text)


@given(strings=STOPS, text=SMALL)
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(strings: list[str], text: str) -> None:
    stop, shown = StopStrings(strings), ""
    for index, char in enumerate(text):
        safe, stopped = stop.feed(char)
        if stopped:
            return
        shown += safe
        held = text[len(shown) : index + 1]
        assert shown + held == text[: index + 1]
        begun = [tail for size in range(index + 2) if any(s.startswith(tail := text[index + 1 - size : index + 1]) for s in strings)]
        assert held == (max(begun, key=len) if begun else "")


def test_no_part_of_a_stop_string_leaks() -> None:
    stop = StopStrings(["<|end|>", "STOP"])
    assert [stop.feed(piece) for piece in ("Hi <", "|e", "nd", "ing ST", "OP more")] == [
        ("Hi ", False), ("", False), ("", False), ("<|ending ", False), ("", True),
    ]  # fmt: skip
    assert stop.flush() == ""


def test_include_keeps_the_stop_string() -> None:
    stop = StopStrings(["\n\n"], include=True)
    assert stop.feed("a\n") == ("a", False)
    assert stop.feed("\nb") == ("\n\n", True)


def test_a_beginning_that_comes_to_nothing_is_given_out_at_the_end() -> None:
    stop = StopStrings(["END"])
    assert stop.feed("the EN") == ("the ", False)
    assert stop.flush() == "EN"


def test_without_stop_strings_everything_passes() -> None:
    stop = StopStrings([])
    assert stop.feed("anything") == ("anything", False)
    assert stop.flush() == ""


def test_a_stopped_stream_takes_no_more() -> None:
    stop = StopStrings(["a"])
    stop.feed("a")
    with pytest.raises(AssertionError):
        stop.feed("b")


def test_choices_with_the_same_stop_strings_share_what_is_made_of_them() -> None:
    start = time.process_time()
    streams = [StopStrings(["x" * 100_000]) for _ in range(1000)]
    assert time.process_time() - start < 5
    assert [streams[0].feed("x"), streams[1].feed("y")] == [("", False), ("y", False)]


def test_time_does_not_grow_with_the_length_of_stop_strings() -> None:
    start = time.process_time()
    stop = StopStrings(["a" * 50_000 + "b", "a" * 49_999 + "c"])
    shown = sum(len(stop.feed("a" * 10)[0]) for _ in range(20_000))
    assert shown == 200_000 - 50_000
    assert time.process_time() - start < 5
