"""What a speculator learns of steps, and when it drafts: with a proposer that the test scripts, and seconds that it makes up."""

from __future__ import annotations

import time
from collections.abc import Hashable
from collections.abc import Sequence as Ordered

from tokenmill.core.types import SamplingParams
from tokenmill.sampling.state import SamplerState
from tokenmill.scheduler.plan import Work
from tokenmill.scheduler.sequence import Sequence
from tokenmill.speculate.costs import KEPT
from tokenmill.speculate.draft import Draft
from tokenmill.speculate.proposer import Wish, Worth
from tokenmill.speculate.speculator import Speculator

PARAMS = SamplingParams(max_tokens=1 << 30, seed=0)


class Proposing:
    """The same draft whenever one is wanted, with the same odds for every token."""

    name = "proposing"
    writes = False

    def __init__(self, odds: float, length: int) -> None:
        self.draft = Draft((1,) * length, (odds,) * length)
        self.silent = False
        self.reads = 0.0  # seconds, of text for later drafts
        self.invested = 0.0

    def propose(self, wishes: Ordered[Wish], worth: Worth) -> list[Draft]:
        begun = time.monotonic()
        time.sleep(self.reads)
        self.invested = time.monotonic() - begun
        return [self.draft.first(0 if self.silent else wish.most) for wish in wishes]

    def forget(self, key: Hashable) -> None:
        """Nothing is kept."""


class Drawing:
    sampler = SamplerState(PARAMS, 0, [], [])
    ends: frozenset[int] = frozenset()


class Decoding:
    """Sequences that decode. right: how many tokens of a draft are."""

    def __init__(self, odds: float, length: int, right: int, streams: int = 1) -> None:
        self.proposer = Proposing(odds, length)
        self.speculator = Speculator(self.proposer, 8, 0.0)
        self.right = right
        self.sequences = [Sequence(str(number), 0, [1, 2], PARAMS, 0) for number in range(streams)]

    def step(self, plain: float, row: float, gone: bool = False) -> int:
        """Takes `plain` seconds, and so many more for each drafted token; returns how many there were. gone: nobody waits for it."""
        drawings = dict.fromkeys(self.sequences, Drawing())
        for sequence in self.sequences:
            sequence.draft = ()
        self.speculator.draft(drawings, self.sequences, lambda sequence, wanted: wanted)
        step = [Work(sequence, 1, 1, True, draft=sequence.draft) for sequence in self.sequences]
        drafted = sum(len(work.draft) for work in step)
        found = {} if gone else {work.sequence: [1] * (1 + min(self.right, len(work.draft))) for work in step}
        self.speculator.learn(step, found, plain + row * drafted)
        return drafted


def test_what_pays_is_drafted_after_one_step_without() -> None:
    decoding = Decoding(odds=0.9, length=4, right=4)
    assert [decoding.step(plain=1.0, row=0.1) for _ in range(3)] == [0, 4, 4]


def test_drafts_that_are_never_right_rest() -> None:
    decoding = Decoding(odds=0.9, length=4, right=0)
    assert not all(decoding.step(plain=1.0, row=0.1) for _ in range(40))


def without(drafted: Ordered[int]) -> int:
    """Steps without drafts: the first, before anything is known, and checks."""
    return sum(count == 0 for count in drafted)


def test_what_is_read_for_the_sake_of_later_drafts_is_not_held_against_those_of_this_step() -> None:
    decoding = Decoding(odds=0.9, length=4, right=4)
    decoding.proposer.reads = 0.01
    assert without([decoding.step(plain=0.001, row=0.0001) for _ in range(30)]) <= 2


def test_a_step_whose_sequences_have_gone_says_nothing_of_drafts() -> None:
    """A text that ends an answer is found while the next step runs: that it gave nothing was not for its drafts."""
    decoding = Decoding(odds=0.9, length=4, right=1)
    drafted = []
    for number in range(400):
        drafted.append(decoding.step(plain=1.0, row=0.1, gone=number % 3 == 2))
    assert without(drafted) <= 7


def test_what_a_busy_machine_took_is_not_believed_for_good() -> None:
    """Drafts are rare and gain little. After a while in which everything took twice as long, steps without drafts are soon known to be
    fast again, and those with drafts only if there are some."""
    decoding = Decoding(odds=0.4, length=2, right=1)

    def drafted(steps: int, level: float) -> int:
        found = 0
        for number in range(steps):
            decoding.proposer.silent = number % 4 > 0
            found += decoding.step(plain=level, row=0.2 * level)
        return found

    assert drafted(400, 1.0)
    assert drafted(400, 2.0)
    drafted(KEPT + 8, 1.0)
    assert drafted(400, 1.0)


def test_drafts_end_when_steps_without_have_become_cheap_unseen() -> None:
    """As when long sequences give way to short ones: what every step with drafts costs is measured, and what one without does is not."""
    decoding = Decoding(odds=0.5, length=2, right=1)
    before = [decoding.step(plain=0.1, row=0.001) for _ in range(60)]
    assert sum(count > 0 for count in before) > 50
    for _ in range(200):
        decoding.step(plain=0.05, row=0.05)
    after = [decoding.step(plain=0.05, row=0.05) for _ in range(100)]
    assert sum(count > 0 for count in after) < 20
