"""What the next step does: a pure decision.

Order of service is (priority, arrival). The rules, and why no sequence waits forever:

- Every running sequence that has only its newest token to compute decodes. Prompt tokens share `chunk_size` per
  step, first come first served within the order; a prompt is cut anywhere, and at the points of its KV budget.
- Where steps are bounded (`max_rows`), prompts beside decoding sequences get the rows that these leave, but always a frame's and a
  quarter as many as there are such sequences, so that they get on whoever decodes.
- A sequence is admitted with frames for *all* its tokens and one more, so that no prefill stops halfway for want of
  frames, plus one spare frame per running sequence and KV group, so that what is admitted is not preempted at the next
  frame boundary. Where groups give back frames on the way (windows, budgets) it is the most that it holds at a time that
  is kept for it, and taken as it goes. Alone it needs no spare: an empty pool fits whatever admission control accepted.
  For frames that other engines come for (leases) it waits; where nobody runs, those that wait for others' work (reservations) are its.
- The waiting are admitted strictly in order: a large head is not overtaken by smaller ones. Only a *follower* is
  passed over: one whose next prefix frame is just being computed by a running prefill ahead of it. It gets
  that work for free by waiting, never later than it could have done it itself, since the leader is served first;
  and as it is asked anew each step, nothing is stuck when the leader is aborted or preempted. So is one that awaits what a
  store has of it, for a few milliseconds and within bounds.
- Drafts of decoding sequences are verified with the rows that the rest of the step leaves, in frames that were lent for them.
- When growth finds no frames, the last in order is preempted, whoever needs the frame; in such a step nobody is
  admitted. The first in order is thus never preempted, and finishes. A waiting sequence takes the place of running
  ones only if its priority is strictly higher, and nobody behind them is admitted in their stead.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tokenmill.core.types import FRAME
from tokenmill.kv.budget import Ladder
from tokenmill.kv.prefix_tree import MISS, PrefixHit
from tokenmill.scheduler.queues import rank
from tokenmill.scheduler.sequence import Sequence

UNBOUNDED = 1 << 30
"""Tokens; longer than any sequence."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_batch_size: sequences in one step. chunk_size: prompt tokens in one step; without chunked prefill a
    prompt is never cut, and one longer than that has the prompt tokens of its step to itself. max_rows: of a step in which somebody
    decodes, as far as prompts can wait (chunked prefill only)."""

    max_batch_size: int
    chunk_size: int
    chunked_prefill: bool = True
    max_rows: int = UNBOUNDED

    @property
    def chunk(self) -> int:
        """The most prompt tokens of one sequence in a step."""
        return self.chunk_size if self.chunked_prefill else UNBOUNDED


class KVView(Protocol):
    """What planning reads of the KV manager."""

    @property
    def available(self) -> int: ...
    @property
    def n_groups(self) -> int: ...
    @property
    def n_holders(self) -> int: ...
    @property
    def shares_prefixes(self) -> bool: ...
    def covered(self, seq_id: Hashable) -> int: ...
    def missing(self, seq_id: Hashable, n_tokens: int, step: int) -> int: ...
    def fresh(self, hit: PrefixHit, goal: int, chunk: int, ladder: Ladder | None) -> int: ...
    def releasable(self, seq_id: Hashable) -> int: ...
    def match(self, tokens: Ordered[int], salt: str, limit: int | None) -> PrefixHit: ...


class Work(NamedTuple):
    """Compute positions [start, start + n_tokens) of a sequence; `samples` when that reaches its target, so that
    its last row yields a token. sparse: its streaming KV groups see sinks and recent positions only. weighs: the attention
    weights of these rows are wanted. draft: tokens for the positions that follow, to be verified: as many more rows."""

    sequence: Sequence
    start: int
    n_tokens: int
    samples: bool
    sparse: bool = False
    weighs: bool = False
    draft: tuple[int, ...] = ()


class Reservation(NamedTuple):
    """Frames for [0, n_tokens), but only for [0, step) in KV groups that give back what falls out of sight. need: how many that is,
    beyond those that are promised to the sequence."""

    sequence: Sequence
    n_tokens: int
    step: int
    need: int


@dataclass(slots=True)
class Plan:
    """preempt: running sequences that lose their frames. admit: waiting ones that get tables over the tokens
    found in the prefix cache. reserve: who gets frames, in order. work: the step. short: not even the first in order finds frames."""

    preempt: list[Sequence] = field(default_factory=list)
    admit: list[Sequence] = field(default_factory=list)
    reserve: list[Reservation] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    short: bool = False


def plan(waiting: Iterable[Sequence], running: Iterable[Sequence], limits: Limits, kv: KVView) -> Plan:
    """Decide the next step. waiting, running: in order of service. Nothing is changed."""
    planner = _Planner(running, limits, kv)
    planner.grow()
    planner.decode()
    planner.prefill(waiting)
    planner.speculate()
    return planner.plan


class _Planner:
    """One decision in the making. `available` errs low, never high."""

    def __init__(self, running: Iterable[Sequence], limits: Limits, kv: KVView) -> None:
        self.plan = Plan()
        self.limits = limits
        self.kv = kv
        self.available = kv.available
        self.running = list(running)
        self.alone = kv.n_holders == len(self.running)  # no frames are held for others
        self.pending: deque[Sequence] = deque()
        self.budget = limits.chunk_size
        self.withheld = 0  # from prompts alone

    def grow(self) -> None:
        """Find frames for each running sequence's next position, preempting from the end of the order."""
        at = 0
        while at < len(self.running):
            sequence = self.running[at]
            target, covered = sequence.target, self.kv.covered(sequence.id)
            if target > covered and (step := self._step(sequence, sequence.computed)) > covered:
                tokens = target if step == target else self._run(sequence, target)
                need = self.kv.missing(sequence.id, tokens, step)
                while need > self.available and len(self.running) > max(at, 1):
                    self._preempt_last()
                if at == len(self.running):
                    return
                self.plan.short |= need > self.available
                self.available -= need
                self.plan.reserve.append(Reservation(sequence, tokens, step, need))
            at += 1

    def decode(self) -> None:
        """Give each running sequence its newest token; those with more to compute are left for `prefill`."""
        for sequence in self.running:
            computed = sequence.computed
            if sequence.target - computed == 1:
                if sequence.ladder is None:
                    self.plan.work.append(Work(sequence, computed, 1, True))
                else:
                    self._add(sequence, computed, 1)
            else:
                self.pending.append(sequence)

    def prefill(self, waiting: Iterable[Sequence]) -> None:
        """Share the prompt budget, in order, between running prefills and those that can be admitted."""
        self._bound()
        leaders: list[Sequence] = []
        followers = 0
        for sequence in () if self.plan.preempt else waiting:
            while self.pending and self.pending[0].rank < sequence.rank:
                leaders.append(self.pending.popleft())
                self._compute(leaders[-1], leaders[-1].computed)
            if self.budget <= 0:
                break  # before the look-up, which costs more than the rest
            if self.plan.preempt and self.plan.preempt[-1].rank < sequence.rank:
                break  # a victim is next in order
            if sequence.awaits:
                followers += 1
                continue
            limit = sequence.reuse_limit
            hit = MISS if limit == 0 else self.kv.match(sequence.token_ids, sequence.cache_salt, limit)
            start = hit.frames * FRAME
            if any(self._follows(sequence, start, leader) for leader in leaders):
                followers += 1  # it keeps the place in the batch that it will take
                if len(self.running) + followers >= self.limits.max_batch_size:
                    break
                continue
            if not self._share(sequence.stop(start) - start) or not self._admit(sequence, hit, followers):
                break
            leaders.append(sequence)
            self._compute(sequence, start)
        for sequence in self.pending:
            self._compute(sequence, sequence.computed)
        if self.plan.preempt:  # the last in order, so that no one else's share of the budget changes
            self.plan.work = [work for work in self.plan.work if work.sequence not in self.plan.preempt]
            self.plan.reserve = [wish for wish in self.plan.reserve if wish.sequence not in self.plan.preempt]

    def speculate(self) -> None:
        """Add drafts, in order, as far as rows are left and frames are there."""
        self.budget += self.withheld  # what a draft is worth was weighed when it was made
        for at, work in enumerate(self.plan.work):
            sequence = work.sequence
            if not sequence.draft:
                continue
            assert work.start + work.n_tokens == sequence.target, "a draft goes on from the newest token"
            room = min(self.budget, self.kv.covered(sequence.id) - sequence.target)
            if room > 0:
                draft = sequence.draft[:room]
                self.budget -= len(draft)
                self.plan.work[at] = work._replace(draft=draft)

    def _bound(self) -> None:
        """Leave prompts no more rows than a step of bounded length has beside those who decode."""
        streams = len(self.plan.work)
        if streams:
            taken = streams + sum(len(work.sequence.draft) for work in self.plan.work)
            self.withheld = max(0, self.budget - max(self.limits.max_rows - taken, FRAME, streams // 4))
            self.budget -= self.withheld

    def _share(self, left: int) -> int:
        """How many of `left` prompt tokens the budget grants."""
        if self.limits.chunked_prefill or left <= self.budget:
            return min(left, self.budget)
        return left if self.budget == self.limits.chunk_size else 0

    def _compute(self, sequence: Sequence, start: int) -> None:
        count = self._share(sequence.stop(start) - start)
        if count > 0:
            self.budget -= count
            self._add(sequence, start, count)

    def _add(self, sequence: Sequence, start: int, count: int) -> None:
        samples, sparse = start + count == sequence.target, sequence.sparsified_from is not None
        self.plan.work.append(Work(sequence, start, count, samples, sparse, sequence.weighs(start)))

    def _step(self, sequence: Sequence, start: int) -> int:
        """Up to which position a step computes a sequence at most."""
        return start + 1 if sequence.target == start + 1 else min(sequence.stop(start), start + self.limits.chunk)

    def _run(self, sequence: Sequence, goal: int) -> int:
        """The positions up to which it gets frames at once: its goal, or the next point of its budget."""
        rung = sequence.rung
        return goal if rung is None else min(goal, rung.point)

    def _follows(self, sequence: Sequence, found: int, leader: Sequence) -> bool:
        """Whether `leader` is about to compute the frame after the `found` tokens that `sequence` can reuse."""
        end = found + FRAME
        limit = sequence.reuse_limit
        return (
            (limit is None or end <= limit)
            and self.kv.shares_prefixes
            and leader.cache_salt == sequence.cache_salt
            and leader.computed < end <= leader.shareable
            and end < sequence.target
            and leader.token_ids[:end] == sequence.token_ids[:end]
        )

    def _admit(self, sequence: Sequence, hit: PrefixHit, followers: int) -> bool:
        """Take a place and frames for a waiting sequence, from sequences of lower priority if need be."""
        fresh = self.kv.fresh(hit, sequence.goal, self.limits.chunk, sequence.ladder)
        # Frames that a victim shares may turn idle, and then count in what it releases: they are paid for in full.
        whole = fresh + hit.held
        cost = whole if self.plan.preempt else fresh + hit.idle
        places = self.limits.max_batch_size - len(self.running) - followers
        available = self.available
        rest = len(self.running)
        while places < 1 or ((rest or not self.alone) and cost + rest * self.kv.n_groups > available):
            if not rest or (self.plan.admit and not self.plan.preempt):
                return False  # what was admitted without paying in full may rest on a victim's frames
            victim = self.running[rest - 1]
            if victim.priority <= sequence.priority:
                return False
            rest -= 1
            places += 1
            available += self.kv.releasable(victim.id)
            cost = whole
        while len(self.running) > rest:
            self._preempt_last()
        self.available -= cost
        insort(self.running, sequence, key=rank)
        self.plan.admit.append(sequence)
        step = self._step(sequence, hit.frames * FRAME)
        self.plan.reserve.append(Reservation(sequence, self._run(sequence, sequence.goal), step, 0))
        return True

    def _preempt_last(self) -> None:
        victim = self.running.pop()
        self.plan.preempt.append(victim)
        self.available += self.kv.releasable(victim.id)
