"""When a draft model drafts, and how far: with a model that says what the test wants."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.types import SamplingParams
from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import Batch
from tokenmill.kv.groups import KVGroup, Whole
from tokenmill.kv.manager import KVManager
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.state import SamplerState
from tokenmill.speculate.costs import KEPT
from tokenmill.speculate.draft_model import OPEN_MINDED, DraftModel
from tokenmill.speculate.proposer import Wish, Worth

VOCABULARY = 64
SURE, UNSURE = 20.0, 2.0


class Counting:
    """Says that the next token is one more, as sure of it as `sure` says of the position."""

    def __init__(self, sure: Callable[[int], float] = lambda position: SURE) -> None:
        self.sure = sure
        self.runs = 0

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        self.runs += 1
        logits = np.zeros((len(batch.outputs), VOCABULARY), np.float32)
        ends = {s.row + s.rows - 1: s.position + s.rows for s in batch.segments}
        for row, output in enumerate(batch.outputs):
            logits[row, (batch.tokens[output] + 1) % VOCABULARY] = self.sure(ends[output])
        return logits


class Sequences:
    """Some that decode, and their draft model."""

    def __init__(self, model: Counting, names: str = "a", prompt: int = 12) -> None:
        kv = KVManager([KVGroup("all", Whole(), ((0, 0),))], 256, BlockManagerConfig(block_size=8))
        tape: Any = model
        self.model = model
        self.drafting = DraftModel(tape, kv, Sampler(Pool(1)), group=0, rows=64, most=8, share=0.05, rejects=False)
        self.tokens = {name: list(range(prompt)) for name in names}
        self.states = {name: SamplerState(SamplingParams(temperature=0, seed=0, max_tokens=400), 0, [], []) for name in names}
        for name in names:
            kv.acquire(name, self.tokens[name], "")
            assert kv.reserve(name, 1600 // len(names))

    def propose(self, worth: Worth, most: int = 8, ends: frozenset[int] = frozenset()) -> list[tuple[int, ...]]:
        wishes = [Wish(name, tokens, 12, most, left=400, state=self.states[name], ends=ends) for name, tokens in self.tokens.items()]
        return [draft.tokens for draft in self.drafting.propose(wishes, worth)]

    def put_out(self, *tokens: int) -> None:
        for each in self.tokens.values():
            each.extend(tokens)

    def count_on(self, count: int) -> None:
        for each in self.tokens.values():
            last = each[-1]
            each.extend((last + 1 + i) % VOCABULARY for i in range(count))


def seconds(row: float, rows: int = 1) -> Worth:
    """Of a step that takes a second, and so much more for each row beyond. Drafting with such a model costs next to nothing."""
    return Worth(rows, float(rows), lambda count: 1 + row * (count - rows))


def test_a_model_that_is_sure_drafts_as_much_as_is_wanted() -> None:
    asked = Sequences(Counting())
    assert asked.propose(seconds(row=0.05)) == [tuple(range(12, 20))]
    assert asked.propose(seconds(row=0.05), most=3) == [(12, 13, 14)]
    assert asked.propose(seconds(row=0.05), most=0) == [()]


def test_a_draft_ends_with_a_token_that_ends_the_sequence() -> None:
    assert Sequences(Counting()).propose(seconds(row=0.05), ends=frozenset({14})) == [(12, 13, 14)]


def test_a_draft_goes_no_further_than_it_is_likely_to_be_right_and_keeps_what_was_drawn() -> None:
    """Three tokens that it is sure of and one that it is not: after that one, a token more would not pay."""
    asked = Sequences(Counting(lambda position: SURE if position < 15 else UNSURE))
    assert asked.propose(seconds(row=0.2)) == [(12, 13, 14, 15)]
    assert asked.model.runs == 4


def test_where_not_even_right_drafts_would_pay_none_is_tried() -> None:
    asked = Sequences(Counting())
    for _ in range(100):
        assert asked.propose(seconds(row=1.5)) == [()]
        asked.count_on(1)
    assert asked.model.runs == 0


def test_a_sequence_whose_drafts_are_wrong_is_left_alone_and_the_model_does_not_follow_it() -> None:
    asked = Sequences(Counting())
    steps: list[int] = []
    for step in range(200):
        if asked.propose(seconds(row=0.5))[0]:
            steps.append(step)
        asked.put_out(63)
    assert 5 < len(steps) < 60
    runs = asked.model.runs
    assert asked.propose(seconds(row=0.5)) == [()]
    assert asked.model.runs == runs
    assert asked.propose(seconds(row=0.01)) == [()], "it has to catch up"
    asked.put_out(5)
    while asked.model.runs < runs + 10 and not asked.propose(seconds(row=0.01))[0]:
        asked.count_on(1)
    assert asked.propose(seconds(row=0.01))[0], "where rows cost less, it pays"


def test_after_sequences_that_were_drafted_for_in_vain_another_is_tried_in_the_end() -> None:
    asked = Sequences(Counting())
    drafted: list[int] = []
    for _ in range(3 * OPEN_MINDED):
        drafted.append(0)
        asked.drafting.forget("a")
        for _ in range(40):
            drafted[-1] += bool(asked.propose(seconds(row=0.5))[0])
            asked.put_out(63)
        del asked.tokens["a"][12:]
    assert drafted[0]
    tried = [number for number, found in enumerate(drafted) if found]
    assert drafted.count(0) > OPEN_MINDED
    assert any(number >= OPEN_MINDED for number in tried)


def test_many_sequences_pay_for_their_rows() -> None:
    """What pays for one alone does not where each row costs what a token is worth."""
    assert all(Sequences(Counting()).propose(seconds(row=0.3)))
    assert Sequences(Counting(), "abcd").propose(seconds(row=0.3, rows=4)) == [()] * 4


@pytest.mark.parametrize("missing", [16, 40])
def test_a_long_text_is_caught_up_with_in_parts(missing: int) -> None:
    asked = Sequences(Counting(), prompt=12 + missing)
    asked.drafting._rows = 16
    steps = 0
    while not asked.propose(seconds(row=0.01))[0]:
        asked.count_on(1)
        steps += 1
        assert steps < 20
    assert steps >= missing // 16
    assert asked.propose(seconds(row=0.01))[0][0] == (asked.tokens["a"][-1] + 1) % VOCABULARY


@pytest.mark.parametrize(("prompt", "read"), [(40, True), (1000, False)])
def test_a_text_is_caught_up_with_only_if_drafts_are_expected_to_save_more(prompt: int, read: bool) -> None:
    """A drafted token saves most of a second, and a token takes a quarter of one to read, as far as is known."""
    worth = Worth(1, 1.0, lambda rows: 1 + 0.05 * (rows - 1) if rows <= 9 else 81.0)
    asked = Sequences(Counting(), prompt=prompt)
    for _ in range(10):
        asked.propose(worth)
        asked.count_on(1)
    assert (asked.model.runs > 0) == read


def test_tokens_are_arrays_of_what_was_not_computed() -> None:
    """Two tokens were accepted and one came: the model computes the last of them only, and the one that it had not seen."""
    asked = Sequences(Counting())
    seen: list[list[int]] = []
    run = asked.model.run

    def watched(batch: Batch) -> npt.NDArray[np.float32]:
        assert isinstance(batch.tokens, array)
        seen.append(list(batch.tokens))
        return run(batch)

    asked.model.run = watched  # type: ignore[method-assign]
    assert asked.propose(seconds(row=0.05), most=2) == [(12, 13)]
    asked.put_out(12, 13, 40)
    assert asked.propose(seconds(row=0.05), most=1) == [(41,)]
    assert seen == [list(range(12)), [12], [13, 40]]


def test_a_model_without_a_finite_number_drafts_nothing() -> None:
    asked = Sequences(Counting(lambda position: float("inf") if position < 20 else SURE))
    assert asked.propose(seconds(row=0.05)) == [()]
    asked.put_out(*range(12, 20))
    assert asked.propose(seconds(row=0.05)) == [tuple(range(20, 28))]


def test_a_model_that_once_took_long_is_tried_again() -> None:
    """Its first run fell into a pause of the whole machine."""
    asked = Sequences(Counting())
    asked.drafting._costs.observe(1, 1000.0)
    for _ in range(KEPT):
        assert asked.propose(seconds(row=0.05)) == [()]
        asked.put_out((asked.tokens["a"][-1] + 1) % VOCABULARY)
    drafts = []
    for _ in range(40):
        drafts += asked.propose(seconds(row=0.05))
        asked.put_out((asked.tokens["a"][-1] + 1) % VOCABULARY)
    assert any(drafts), "it has to catch up first"
