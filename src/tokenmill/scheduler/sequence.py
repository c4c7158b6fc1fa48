"""A sequence: one generation, from which everything else about it can be rebuilt."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenmill.core.types import FRAME, FinishReason, SamplingParams
from tokenmill.kv.budget import WEIGHED, Ladder, Rung

Weights = npt.NDArray[np.int64]
"""Attention weights by frame of positions, fixed point."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One generation, wholly described by its token ids, sampling parameters, seed, `computed` and `target`.

    token_ids: prompt and output; grows as tokens are sampled. prompt_len: of these, the prompt's; 0: all there are at first.
    arrival: seconds on the scheduler's clock; siblings of one request share it.
    reuse: False computes every position, whatever the prefix tree holds (prompt log-probabilities need them all).
    computed: positions whose keys and values are in frames. Preemption sets it back to 0; what it computes again
    is the same.
    cached_tokens, reused, first_scheduled: prompt tokens found in the prefix tree, these and tokens of the output, and the time, at first
    admission.
    running: whether it has a place in the batch and frames.
    hands_over: it ends with its first token, and others go on with it.
    kv_budget: frames that it may keep, over all KV groups; None for any number. ladder: what it does as that fills up, set by the
    scheduler. climbed: points of the ladder that it has passed. sparsified_from: the first of them; what it computes from there on
    has not seen everything. dropped_tokens: for each token that the last step gave, positions that some KV group no longer had.
    weights: of frames, as gathered so far for the next point. All these go back to nothing with preemption.
    looked_up, awaits: whether a store has been asked for what it has of it, and whether that is on its way; set by who asks.
    draft: tokens that somebody expects from `target` on, for the next step to verify as far as it has room.
    finish_reason, stop_token: set by whoever ends the sequence.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    priority: int = 1
    arrival: float = 0.0
    cache_salt: str = ""
    reuse: bool = True
    kv_budget: int | None = None
    prompt_len: int = 0
    hands_over: bool = False
    id: tuple[str, int] = field(init=False)
    rank: tuple[int, float, str, int] = field(init=False)
    computed: int = field(default=0, init=False)
    running: bool = field(default=False, init=False)
    ladder: Ladder | None = field(default=None, init=False)
    climbed: int = field(default=0, init=False)
    sparsified_from: int | None = field(default=None, init=False)
    dropped_tokens: list[int] = field(default_factory=list, init=False)
    weights: Weights | None = field(default=None, init=False)
    looked_up: bool = field(default=False, init=False)
    awaits: bool = field(default=False, init=False)
    draft: tuple[int, ...] = field(default=(), init=False)
    cached_tokens: int = field(default=0, init=False)
    reused: int = field(default=0, init=False)
    first_scheduled: float | None = field(default=None, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_token: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.token_ids, f"sequence {self.request_id} has no prompt"
        self.prompt_len = self.prompt_len or len(self.token_ids)
        self.id = (self.request_id, self.choice)
        self.rank = (self.priority, self.arrival, self.request_id, self.choice)

    @property
    def target(self) -> int:
        """Positions that `computed` has to reach before the next token can be sampled."""
        return len(self.token_ids)

    @property
    def n_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def over_budget(self) -> bool:
        """Whether the newest token's keys and values would not fit into the budget: the sequence is over."""
        return self.ladder is not None and not self.ladder.fits(self.target)

    @property
    def rung(self) -> Rung | None:
        """The next point of its ladder."""
        return None if self.ladder is None else self.ladder.rung(self.climbed)

    @property
    def goal(self) -> int:
        """Tokens to have frames for at admission: all, and one more if the budget has room for it."""
        return self.target if self.ladder is not None and not self.ladder.fits(self.target + 1) else self.target + 1

    @property
    def reuse_limit(self) -> int | None:
        """How many tokens may come from the prefix cache (None: any number).

        Rows whose attention is weighed are computed, and so is the last frame before a point, so that it is passed by computing.
        """
        if not self.reuse:
            return 0
        first = None if self.ladder is None else self.ladder.rung(0)
        return None if first is None else first.point - (WEIGHED if first.weighs else FRAME)

    @property
    def draft_room(self) -> int:
        """How many tokens beyond its newest one the next step may compute, if that is the only one left: no more than may be put out
        beside the token that the step samples, than its budget has room for, and none at a point or where attention is weighed."""
        assert self.params.max_tokens is not None
        room = self.params.max_tokens - self.n_output - 1
        ladder, target, rung = self.ladder, self.target, self.rung
        if ladder is None:
            return room
        if rung is not None:
            room = min(room, rung.point - (WEIGHED if rung.weighs else 0) - target)
        return bisect_left(range(1, room + 1), True, key=lambda more: not ladder.fits(target + more))

    @property
    def shareable(self) -> int:
        """How many of its tokens others may come to share: what it computes beyond its first point never enters the prefix cache."""
        first = None if self.ladder is None else self.ladder.rung(0)
        return self.target if first is None else min(self.target, first.point)

    def stop(self, start: int) -> int:
        """Where work that begins at `start` ends at the latest: at its target, at a point, or where weighing for it begins."""
        rung = self.rung
        if rung is None:
            return self.target
        if rung.weighs and start < rung.point - WEIGHED:
            return min(self.target, rung.point - WEIGHED)
        return min(self.target, rung.point)

    def weighs(self, start: int) -> bool:
        """Whether the attention of the rows from `start` on decides what goes at the next point."""
        rung = self.rung
        return rung is not None and rung.weighs and start >= rung.point - WEIGHED

    def weigh(self, weights: Weights) -> None:
        """Add what more rows have attended to."""
        if self.weights is None:
            self.weights = weights.copy()
            return
        if len(weights) > len(self.weights):
            self.weights = np.concatenate((self.weights, np.zeros(len(weights) - len(self.weights), np.int64)))
        self.weights[: len(weights)] += weights

    def restart(self) -> None:
        """Nothing is computed any more."""
        self.computed = self.climbed = 0
        self.sparsified_from = self.weights = None
        self.dropped_tokens = []
        self.looked_up = False
        self.draft = ()
