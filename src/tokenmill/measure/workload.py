"""What is asked, and when: lengths, prompts and arrival times. Pure; the same seed makes the same workload."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tokenmill.core.errors import ConfigError

_TEXT = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were when we there
can an your which their said if do will each about how up out them then she many some so these would other into has more her two
like him see time could no make than first been its who now people my made over did down only way find use may water long little
very after words called just where most know get through back much before go good new write our used me man too any day same right
look think also around another came come work three word must because does part even place well such here take why things help put
years different away again off went old number great tell men say small every found still between name should home big give air
line set own under read last never us left end along while might next sound below saw something thought both few those always
looked show large often together asked house world going want school important until form food keep children feet land side without
"""

WORDS = tuple(_TEXT.split())
"""Common words, one token each in the vocabularies of most models."""

MOST = 2**20
"""Tokens in a prompt: no position is above that (docs/numerics.md)."""

SHORTEST, LONGEST = 4, 1024
"""Of the ShareGPT-like mix: what benchmarks usually cut the data set to."""


@dataclass(frozen=True)
class Ask:
    """One request. at: seconds after the start when it arrives (0 if it is sent as soon as its turn comes)."""

    prompt: str
    max_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class Lengths:
    """Log-normal with that median and spread of the logarithm, within [low, high]; spread None: uniform in [low, high]."""

    low: int
    high: int
    median: float = 0.0
    sigma: float | None = None

    @classmethod
    def parse(cls, text: str, option: str, mix: Lengths) -> Lengths:
        """`sharegpt` (that is `mix`), `N` or `LOW-HIGH`. Raises `ConfigError` naming the option."""
        if text == "sharegpt":
            return mix
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high <= MOST:
            raise ConfigError(f"{option} is {text!r}, but must be a number of tokens up to {MOST}, LOW-HIGH, or sharegpt", param=option)
        return cls(low, high)

    def draw(self, rng: np.random.Generator) -> int:
        if self.sigma is None:
            return int(rng.integers(self.low, self.high + 1))
        return min(self.high, max(self.low, round(self.median * math.exp(self.sigma * rng.standard_normal()))))


SHAREGPT_PROMPT = Lengths(SHORTEST, LONGEST, median=90, sigma=1.35)
SHAREGPT_OUTPUT = Lengths(SHORTEST, LONGEST, median=140, sigma=1.05)
"""Their means, about 190 and 220 tokens, are near those of the samples that other engines' benchmarks draw from ShareGPT."""


def text_of(n_tokens: int, rng: np.random.Generator) -> str:
    """Random common words, about as many tokens as asked for."""
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), n_tokens))


def arrivals(rate: float, rng: np.random.Generator) -> Iterator[float]:
    """A Poisson process: seconds from the start, `rate` per second on average, for ever."""
    at = 0.0
    while True:
        at += rng.exponential(1 / rate)
        yield at


@dataclass(frozen=True)
class Workload:
    """shared_prefix: tokens that each prompt has in common with the others of its group, before its own.

    rate: arrivals per second; None if requests are sent when earlier ones are done.
    """

    prompt: Lengths
    output: Lengths
    seed: int
    rate: float | None = None
    shared_prefix: int = 0
    prefix_groups: int = 1

    def asks(self) -> Iterator[Ask]:
        """Requests for ever, in order of arrival."""
        # Streams of their own: changing the rate leaves the prompts as they are.
        times, lengths, words = (np.random.default_rng(part) for part in np.random.SeedSequence(self.seed).spawn(3))
        prefixes = [text_of(self.shared_prefix, words) + " " if self.shared_prefix else "" for _ in range(self.prefix_groups)]
        at = iter(arrivals(self.rate, times)) if self.rate is not None else None
        while True:
            prefix = prefixes[int(words.integers(len(prefixes)))]
            prompt = prefix + text_of(self.prompt.draw(lengths), words)
            yield Ask(prompt, self.output.draw(lengths), 0.0 if at is None else next(at))
