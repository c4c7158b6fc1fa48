"""An engine reads a text, and every row of logits is there to be compared: the whole vocabulary, a few positions at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing

import numpy as np
import numpy.typing as npt

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams, TokenLogprobs
from tokenmill.engine.build import build_engine
from tokenmill.engine.loading import Loaded
from tokenmill.kernels.native import Pool
from tokenmill.measure.quality.likelihood import Track, compare, log_softmax
from tokenmill.sampling.sampler import Question, Sampler

F32 = npt.NDArray[np.float32]

ROWS = 64
"""Prompt tokens in one step, so that no more rows of logits wait than that: 64 of 150,000 tokens are 39 MB."""


class KeepingSampler(Sampler):
    """A sampler that keeps the logits of prompt positions until they are taken. They come in the order of the text, since an
    engine with one request never computes a position before an earlier one."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._kept: list[F32] = []

    @property
    def kept(self) -> int:
        """Rows that have not been taken."""
        return sum(map(len, self._kept))

    def likelihoods(self, logits: F32, questions: Sequence[Question]) -> list[TokenLogprobs]:
        self._kept.append(logits[[q.row for q in questions]])
        return super().likelihoods(logits, questions)

    def take(self, count: int) -> F32:
        """The `count` earliest rows."""
        rows = np.concatenate(self._kept)
        self._kept = [rows[count:]] if len(rows) > count else []
        return rows[:count]


class Reader:
    """The engine of one KV setting, for one text at a time: `begin`, `take` until all is taken, `end`.

    Several over the same `loaded` model take turns: none has a step in flight while another one is asked.
    """

    def __init__(self, config: EngineConfig, loaded: Loaded) -> None:
        self._sampler = KeepingSampler(loaded.pool)
        self._engine = build_engine(config, loaded, self._sampler)
        self._sparsified = False
        self.info = self._engine.info

    def begin(self, tokens: list[int]) -> None:
        assert not self._engine.has_work, "one text at a time"
        params = SamplingParams(temperature=0, seed=0, max_tokens=1, prompt_logprobs=0)
        self._engine.add(Generate(request_id="text", prompt=tokens, params=params))

    def take(self, count: int) -> F32:
        """Logits of the next `count` positions, float32 [count, vocabulary]: row i tells the token after the i-th.

        Raises `InvalidRequest` if the engine gives the text up, as it does when a budget is too small for it.
        """
        while self._sampler.kept < count:
            if not self._engine.has_work:
                raise InvalidRequest(f"the text was given up before its end: {self._sampler.kept} more positions were read, not {count}")
            self._step()
        return self._sampler.take(count)

    def end(self) -> bool:
        """Whether some of the text's keys and values were given up."""
        while self._engine.has_work:
            self._step()
        assert self._sampler.kept == 0, "rows of a text were left over"
        return self._sparsified

    def close(self) -> None:
        self._engine.close()

    def _step(self) -> None:
        """One whole step: `Engine.step` would leave the next one in flight."""
        self._engine.start_step()
        for output in self._engine.finish_step():
            self._sparsified = output.sparsified_from is not None


def read_beside(
    configs: Mapping[str, EngineConfig], loaded: Loaded, texts: Mapping[str, Sequence[list[int]]], tracks: list[Track]
) -> Iterator[str]:
    """Every variant (by name, the reference first) reads every window of every text beside the reference, position by position.

    Fills `tracks`, so that an interrupted run has what it has measured; yields a line for each window that is done.
    """
    with ExitStack() as open_readers:
        readers = {name: open_readers.enter_context(closing(Reader(config, loaded))) for name, config in configs.items()}
        for text, windows in texts.items():
            here = [Track(text, name, reader.info.kv_bytes_per_token) for name, reader in readers.items()]
            tracks += here
            for number, tokens in enumerate(windows):
                _read_window(tokens, list(readers.values()), here)
                yield f"{text}: window {number + 1} of {len(windows)}"


def _read_window(tokens: list[int], readers: Sequence[Reader], tracks: Sequence[Track]) -> None:
    for reader in readers:
        reader.begin(tokens)
    for first in range(0, len(tokens) - 1, ROWS):
        targets = tokens[first + 1 : first + 1 + ROWS]
        reference = log_softmax(readers[0].take(len(targets)))
        for reader, track in zip(readers, tracks, strict=True):
            variant = reference if reader is readers[0] else log_softmax(reader.take(len(targets)))
            track.blocks.append(compare(reference, variant, targets, first))
    for reader, track in zip(readers, tracks, strict=True):
        track.sparsified += reader.end()
