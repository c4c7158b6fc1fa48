"""Execute: from a scheduled step to the tokens and log-probabilities that come out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenmill.core.types import TokenLogprobs
from tokenmill.kernels.ops import Batch, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.kv.manager import KVManager
from tokenmill.sampling.sampler import Draw, Question, Sampler
from tokenmill.sampling.state import SamplerState
from tokenmill.scheduler.scheduler import Step
from tokenmill.scheduler.sequence import Sequence

F32 = npt.NDArray[np.float32]

MAX_OUTPUTS = 64
"""Rows of logits that exist at a time; more are computed in turns, so that a large vocabulary does not cost gigabytes."""


@dataclass
class StepResult:
    """tokens: the new token of each sequence that sampled. logprobs: of those that asked. prompt: log-probabilities of
    prompt tokens by position."""

    tokens: dict[Sequence, int] = field(default_factory=dict)
    logprobs: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    prompt: dict[Sequence, dict[int, TokenLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Wanted:
    """A row whose logits are wanted: to sample from, or (token given) to say how likely that prompt token was."""

    row: int
    sequence: Sequence
    position: int
    token: int | None


class Runner:
    """Runs steps on one tape. `states` maps each running sequence to its sampler state."""

    def __init__(self, tape: Tape, kv: KVManager, sampler: Sampler, vocab: int) -> None:
        self._tape = tape
        self._kv = kv
        self._sampler = sampler
        self._vocab = vocab

    def run(self, step: Step, states: dict[Sequence, SamplerState]) -> StepResult:
        """Compute every work item of the step; KV of its positions is written, and wanted rows are turned into tokens."""
        batch, wanted = self._arrange(step)
        result = StepResult()
        logits = self._tape.run(batch)
        for at in range(0, len(wanted), MAX_OUTPUTS):
            group = wanted[at : at + MAX_OUTPUTS]
            if at:
                logits = self._tape.rerun(np.array([w.row for w in group], np.int32))
            self._read(logits, group, states, result)
        return result

    def _arrange(self, step: Step) -> tuple[Batch, list[_Wanted]]:
        tokens: list[int] = []
        segments: list[Segment] = []
        wanted: list[_Wanted] = []
        for sequence, start, n_tokens, samples in step:
            row = len(tokens)
            tokens += sequence.token_ids[start : start + n_tokens]
            table = self._kv.table(sequence.id)
            segments.append(Segment(row, n_tokens, start, table.first[: table.count], table.starts[: table.count]))
            if sequence.params.prompt_logprobs is not None:
                last = min(start + n_tokens, sequence.prompt_len - 1)
                wanted += [_Wanted(row + p - start, sequence, p + 1, sequence.token_ids[p + 1]) for p in range(start, last)]
            if samples:
                wanted.append(_Wanted(row + n_tokens - 1, sequence, start + n_tokens, None))
        outputs = np.array([w.row for w in wanted[:MAX_OUTPUTS]], np.int32)
        return Batch(np.array(tokens, np.int32), segments, outputs), wanted

    def _read(self, logits: F32, group: list[_Wanted], states: dict[Sequence, SamplerState], result: StepResult) -> None:
        draws = [(w, Draw(i, states[w.sequence], w.position)) for i, w in enumerate(group) if w.token is None]
        if draws:
            for (w, _), token in zip(draws, self._sampler.sample(logits, [d for _, d in draws]), strict=True):
                result.tokens[w.sequence] = token
        questions: list[tuple[_Wanted, Question]] = []
        for i, w in enumerate(group):
            params = w.sequence.params
            token = w.token if w.token is not None else result.tokens[w.sequence]
            top = params.prompt_logprobs if w.token is not None else params.logprobs
            if top is not None:
                questions.append((w, Question(i, token, min(top, self._vocab))))
        if not questions:
            return
        for (w, _), answer in zip(questions, self._sampler.likelihoods(logits, [q for _, q in questions]), strict=True):
            if w.token is None:
                result.logprobs[w.sequence] = answer
            else:
                result.prompt.setdefault(w.sequence, {})[w.position] = answer
