"""Execute: from a scheduled step to the tokens and log-probabilities that come out of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.core.types import TokenLogprobs
from tokenmill.engine.generation import Generation
from tokenmill.kernels.frames import KVMemory
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.kv.footprint import frames_for
from tokenmill.kv.groups import Whole
from tokenmill.kv.manager import KVManager
from tokenmill.sampling.sampler import NO_TOKEN, Draw, Question, Sampler
from tokenmill.scheduler.scheduler import Step
from tokenmill.scheduler.sequence import Sequence, Weights

F32 = npt.NDArray[np.float32]
Generations = Mapping[Sequence, Generation]
Proposals = Mapping[Sequence, F32]

MAX_OUTPUTS = 64
"""Rows of logits that exist at a time; more are computed in turns, so that a large vocabulary does not cost gigabytes."""


@dataclass(slots=True)
class StepResult:
    """tokens: the new tokens of each sequence that sampled, the last of which may be `NO_TOKEN`. logprobs: theirs, of sequences that
    asked. prompt: log-probabilities of
    prompt tokens by position. weights: of sequences whose work weighs, the attention that each frame of positions got in all groups
    that keep everything, int64."""

    tokens: dict[Sequence, list[int]] = field(default_factory=dict)
    logprobs: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)
    prompt: dict[Sequence, dict[int, TokenLogprobs]] = field(default_factory=dict)
    weights: dict[Sequence, Weights] = field(default_factory=dict)


class Wanted(NamedTuple):
    """A row whose logits are wanted: to sample from, with those after it that verify the draft, or (token given) to say how likely
    that prompt token was."""

    row: int
    sequence: Sequence
    position: int
    token: int | None
    draft: tuple[int, ...] = ()

    @property
    def rows(self) -> range:
        return range(self.row, self.row + 1 + len(self.draft))


@dataclass(slots=True)
class Flight:
    """A step that has been started and not finished.

    wanted: in groups of at most `MAX_OUTPUTS` rows. weights: of those that weigh, int64 [pairs, frames], as the kernels fill them.
    logits: of the first group, once it is executed.
    """

    step: Step
    wanted: list[list[Wanted]]
    weights: dict[Sequence, Weights]
    logits: F32 | None = None


class Runner:
    """Runs steps on one tape, one at a time."""

    def __init__(self, tape: Tape, kv: KVManager, sampler: Sampler, vocab: int) -> None:
        self._tape = tape
        self._kv = kv
        self._sampler = sampler
        self._vocab = vocab
        pairs = sorted(pair for group in kv.groups for pair in group.pairs)  # all of the model's, in the kernels' order
        keeping = {pair for group in kv.groups if isinstance(group.retention, Whole) for pair in group.pairs}
        self._pairs = len(pairs)
        self._keeping = [number for number, pair in enumerate(pairs) if pair in keeping]

    @property
    def memory(self) -> KVMemory:
        """The KV pool's bytes."""
        return self._tape.memory

    def start(self, step: Step) -> Flight:
        """Have the other threads set to work on every work item of the step."""
        batch, wanted, weights = self._arrange(step)
        self._tape.start(batch)
        return Flight(step, wanted, weights)

    def give_way(self) -> None:
        """Between two steps: each thread yields its CPU before it begins with the next one."""
        self._tape.give_way()

    def execute(self, flight: Flight) -> F32:
        """Help until the step is executed: KV of its positions is written. Returns the logits of the first rows that are wanted."""
        if flight.logits is None:
            flight.logits = self._tape.finish()
        return flight.logits

    def finish(self, flight: Flight, generations: Generations, proposals: Proposals | None = None) -> StepResult:
        """`execute`, if that has not been done, and turn wanted rows into tokens.

        proposals: verify drafts by rejection; logits that they were drawn from, by sequence. Sequences that are not in
        `generations` have ended since the start, and nothing is said of them.
        """
        logits = self.execute(flight)
        result = StepResult(weights={sequence: found[self._keeping].sum(axis=0) for sequence, found in flight.weights.items()})
        for at, group in enumerate(flight.wanted):
            if at:
                logits = self._tape.rerun(_rows(group))
            self._read(logits, group, generations, proposals, result)
        return result

    def _arrange(self, step: Step) -> tuple[Batch, list[list[Wanted]], dict[Sequence, Weights]]:
        tokens = array("i")
        weights: dict[Sequence, Weights] = {}
        segments: list[Segment] = []
        wanted: list[Wanted] = []
        for sequence, start, n_tokens, samples, sparse, weighs, draft in step:
            row = len(tokens)
            tokens.extend(sequence.token_ids[start : start + n_tokens])
            tokens.extend(draft)
            pages = tuple(Pages(table.first, table.starts) for table in self._kv.tables(sequence.id))
            segments.append(Segment(row, n_tokens + len(draft), start, pages, sparse, len(weights) if weighs else -1))
            if weighs:
                weights[sequence] = np.zeros((self._pairs, frames_for(start + n_tokens)), np.int64)
            if sequence.params.prompt_logprobs is not None:
                last = min(start + n_tokens, sequence.prompt_len - 1)
                wanted += [Wanted(row + p - start, sequence, p + 1, sequence.token_ids[p + 1]) for p in range(start, last)]
            if samples:
                wanted.append(Wanted(row + n_tokens - 1, sequence, start + n_tokens, None, draft))
        groups = _grouped(wanted)
        outputs = _rows(groups[0]) if groups else array("i")
        return Batch(tokens, segments, outputs, tuple(weights.values())), groups, weights

    def _read(self, logits: F32, group: list[Wanted], generations: Generations, proposals: Proposals | None, result: StepResult) -> None:
        """`group` are the rows that `logits` has."""
        draws: list[Draw] = []
        drawing: list[Sequence] = []
        row = 0
        for _, sequence, position, token, draft in group:
            if token is None and sequence in generations:
                draws.append(Draw(row, generations[sequence].sampler, position, draft))
                drawing.append(sequence)
            row += 1 + len(draft)
        if draws:
            if proposals is None:
                drawn = self._sampler.sample(logits, draws)
            else:
                drawn = self._sampler.reject(logits, draws, [_cut(proposals.get(s), d) for s, d in zip(drawing, draws, strict=True)])
            result.tokens.update(zip(drawing, drawn, strict=True))
        questions: list[Question] = []
        asking: list[Wanted] = []
        row = 0
        for w in group:
            params = w.sequence.params
            top = params.logprobs if w.token is None else params.prompt_logprobs
            if top is not None and w.sequence in generations:
                tokens = result.tokens[w.sequence] if w.token is None else [w.token]
                told = [Question(row + i, token, min(top, self._vocab)) for i, token in enumerate(tokens) if token != NO_TOKEN]
                questions += told
                asking += [w] * len(told)
            row += 1 + len(w.draft)
        if not questions:
            return
        for w, answer in zip(asking, self._sampler.likelihoods(logits, questions), strict=True):
            if w.token is None:
                result.logprobs.setdefault(w.sequence, []).append(answer)
            else:
                result.prompt.setdefault(w.sequence, {})[w.position] = answer


def _grouped(wanted: list[Wanted]) -> list[list[Wanted]]:
    """Cut where the next one's rows are too many for a group."""
    groups: list[list[Wanted]] = []
    room = 0
    for w in wanted:
        if len(w.rows) > room:
            groups.append([])
            room = MAX_OUTPUTS
        groups[-1].append(w)
        room -= len(w.rows)
    return groups


def _cut(proposal: F32 | None, draw: Draw) -> F32 | None:
    """Of the part of a draft that came into the step."""
    return None if proposal is None else proposal[: len(draw.draft)]


def _rows(group: list[Wanted]) -> array[int]:
    return array("i", [row for w in group for row in w.rows])
