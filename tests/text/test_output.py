from __future__ import annotations

import itertools
import random

import pytest
from scripted_engine import EOS, likely
from scripted_serve import byte_tokenizer

from tokenmill.core.messages import SequenceOutput
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.text.output import Delta, OutputText

TOKENIZER = byte_tokenizer(None)


def outputs(data: bytes, cuts: list[int], reason: FinishReason, logprobs: bool = False) -> list[SequenceOutput]:
    """The bytes as tokens, cut into steps; the last step ends the sequence."""
    tokens = [*data, *([EOS] if reason is FinishReason.STOP else [])]
    edges = [0, *sorted(cuts), len(tokens)]
    steps = [tokens[a:b] for a, b in itertools.pairwise(edges)]
    made = [SequenceOutput("a", 0, step, [likely(t, 0) for t in step] if logprobs else None) for step in steps]
    made[-1].finish_reason = reason
    made[-1].stop_token = EOS if reason is FinishReason.STOP else None
    return made


def run(params: SamplingParams, steps: list[SequenceOutput]) -> list[Delta]:
    text = OutputText(TOKENIZER, params)
    deltas = []
    for step in steps:
        if (delta := text.push(step)) is not None:
            deltas.append(delta)
        if text.finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_into_steps_gives_the_same_text_tokens_and_offsets(seed: int) -> None:
    rng = random.Random(seed)
    whole = "".join(rng.choice("ab é🙂xyzstop") for _ in range(rng.randrange(1, 30)))
    data = whole.encode()
    params = SamplingParams(stop=("sto", "🙂é") if rng.random() < 0.5 else (), logprobs=0)
    cuts = rng.sample(range(len(data) + 1), rng.randrange(0, len(data)))
    cut, at_once = (run(params, outputs(data, c, FinishReason.STOP, logprobs=True)) for c in (cuts, []))
    for deltas in (cut, at_once):
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [FinishReason.STOP]
        assert all(len(d.tokens) == len(d.offsets) == len(d.logprobs or []) for d in deltas)
    assert "".join(d.text for d in cut) == "".join(d.text for d in at_once)
    assert [o for d in cut for o in d.offsets] == [o for d in at_once for o in d.offsets]
    assert [t for d in cut for t in d.tokens] == [t for d in at_once for t in d.tokens]
    ends = [whole.find(s) for s in params.stop if s in whole]
    assert "".join(d.text for d in cut) == (whole[: min(ends)] if ends else whole)


def test_tokens_without_text_wait_for_the_text_that_they_begin() -> None:
    deltas = run(SamplingParams(), outputs("a🙂".encode(), [1, 2, 3, 4, 5], FinishReason.STOP))
    assert [(d.text, d.tokens) for d in deltas] == [("a", [97]), ("🙂", [*"🙂".encode()]), ("", [EOS])]


def test_what_follows_a_stop_string_in_the_same_step_is_dropped() -> None:
    text = OutputText(TOKENIZER, SamplingParams(stop=("b",)))
    delta = text.push(SequenceOutput("a", 0, list(b"abcd")))
    assert delta == Delta("a", list(b"ab"), None, [0, 1], FinishReason.STOP)
    assert text.token_count == 2


def test_a_stop_string_hides_an_end_token_behind_it_and_not_one_that_completes_it() -> None:
    step = SequenceOutput("r", 0, list(b"abc"), finish_reason=FinishReason.STOP, stop_token=ord("c"))
    for stop, kept, wanted in (("b", False, None), ("bc", False, ord("c")), ("bc", True, ord("c")), ("x", False, ord("c"))):
        (delta,) = run(SamplingParams(stop=(stop,), include_stop_str_in_output=kept), [step])
        assert (delta.finish_reason, delta.stop_token) == (FinishReason.STOP, wanted)


def test_a_stop_string_that_the_last_token_completes_wins_over_length() -> None:
    deltas = run(SamplingParams(stop=("c",)), outputs(b"abc", [], FinishReason.LENGTH))
    assert (deltas[-1].text, deltas[-1].finish_reason) == ("ab", FinishReason.STOP)


def test_the_token_that_ends_a_choice_has_no_text_unless_it_is_wanted() -> None:
    step = SequenceOutput("a", 0, list(b"ab"), finish_reason=FinishReason.STOP, stop_token=ord("b"))
    for wanted, expected in ((False, "a"), (True, "ab")):
        (delta,) = run(SamplingParams(include_stop_str_in_output=wanted, stop_token_ids=(ord("b"),)), [step])
        assert (delta.text, delta.tokens) == (expected, list(b"ab"))


def test_an_aborted_choice_ends_with_what_it_held_back() -> None:
    text = OutputText(TOKENIZER, SamplingParams(stop=("abc",)))
    assert text.push(SequenceOutput("a", 0, list(b"ab"))) is None
    delta = text.push(SequenceOutput("a", 0, [], finish_reason=FinishReason.ABORT))
    assert delta == Delta("ab", list(b"ab"), None, [0, 1], FinishReason.ABORT)
