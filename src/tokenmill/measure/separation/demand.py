"""What all setups are asked for alike: streams that decode all the time, and long prompts that arrive meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams

STREAM_PROMPT = 32
"""Tokens: too few to be worth a hand-over."""


@dataclass(frozen=True)
class Demand:
    """One turn of one setup.

    streams: so many clients of short prompts and answers of `stream_tokens`, each of which asks again when it has its answer. prompts:
    so many long ones of `prompt_tokens`, with answers of `answer_tokens`, at times of a Poisson process of `rate` per second. number: of
    the round: others have other prompts and times.
    """

    streams: int
    stream_tokens: int
    prompts: int
    prompt_tokens: int
    answer_tokens: int
    rate: float
    vocabulary: int
    seed: int
    number: int = 0

    @property
    def seconds(self) -> float:
        """In which all long prompts arrive."""
        return self.prompts / self.rate

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer, at most."""
        return max(self.prompt_tokens + self.answer_tokens, STREAM_PROMPT + self.stream_tokens)

    def arrivals(self) -> list[float]:
        """Seconds from the start. Given how many there are in a span of time, a Poisson process has them anywhere in it alike."""
        return sorted(self._rng(0, 0).uniform(0, self.seconds, self.prompts).tolist())

    def long(self, number: int) -> Generate:
        return self._generate(f"long {number}", self.prompt_tokens, self.answer_tokens, (1, number))

    def stream(self, client: int) -> Iterator[Generate]:
        """What a client asks for, for ever. Its first answer is shorter, by its number, so that not all end together."""
        number = 0
        while True:
            share = 1.0 if number else (client + 1) / self.streams
            tokens = max(2, round(share * self.stream_tokens))
            yield self._generate(f"stream {client}.{number}", STREAM_PROMPT, tokens, (2, client, number))
            number += 1

    def warm_up(self) -> list[Generate]:
        """Prompts that nobody else has: a long one, and one for each stream."""
        shorts = [self._generate(f"warm {client}", STREAM_PROMPT, 8, (3, client)) for client in range(self.streams)]
        return [self._generate("warm", self.prompt_tokens, 2, (4,)), *shorts]

    def _generate(self, name: str, prompt: int, tokens: int, which: tuple[int, ...]) -> Generate:
        params = SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=tokens)
        return Generate(request_id=name, prompt=self._rng(*which).integers(0, self.vocabulary, prompt).tolist(), params=params)

    def _rng(self, *which: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, self.number, *which))
