"""Random requests, and random mixes of them: what the identity tests serve. Everything is drawn from a seeded generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenmill.core.types import SamplingParams
from tokenmill.text.tokenizer import Tokenizer

SENTENCES = (
    "The mill stands where the river bends, and its wheel has turned for two hundred years.",
    "In winter the pond freezes; the miller then repairs the sieves and sharpens the stones.",
    "def merge(a, b):\n    out = []\n    while a and b:\n        out.append(a.pop(0) if a[0] < b[0] else b.pop(0))\n    return out\n",
    "Question: how many sacks of grain are ground in a day? Answer: between 40 and 65, if the water is high.",
    "Ich ging im Walde so für mich hin, und nichts zu suchen, das war mein Sinn.",
    "<|im_start|>user\nWrite a short poem about rain.<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987,",
    "The quick brown fox jumps over the lazy dog, again and again and again and again.",
    '{"name": "wheel", "diameter_m": 4.2, "speed_rpm": [7, 9, 11], "material": "oak"}\n',
    "Chapter 12. Of the many kinds of flour, and of the bread that each of them makes best.",
)


@dataclass(frozen=True)
class Request:
    """What is asked; who asks it when is an `Arrival`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        """Positions that it may take."""
        assert self.params.max_tokens is not None
        return len(self.prompt) + self.params.max_tokens


Sizes = Callable[[random.Random], tuple[int, int]]
"""Draws tokens of a prompt, about, and the most that answer it."""


@dataclass(frozen=True)
class Arrival:
    """One request of a mix: `request` is its index, `step` when it comes, `abort_after` how many steps later it (or only its choice
    `abort_choice`) is aborted."""

    request: int
    step: int
    priority: int
    salt: str
    abort_after: int | None
    abort_choice: int | None


class Traffic:
    """Draws the requests of a model."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        self._rng = rng = random.Random(seed)
        self._vocab = tokenizer.vocab_size
        self._eos = tuple(sorted(tokenizer.eos_ids))
        self._documents = [tokenizer.encode(" ".join(rng.choices(SENTENCES, k=160))) for _ in range(4)]

    def requests(self, count: int, sizes: Sizes, answer: Callable[[Request], Sequence[int]]) -> list[Request]:
        """`count` requests; many prompts begin alike.

        answer: the tokens with which a request was answered; some prompts go on from there, as the next turn of a chat does.
        """
        drawn: list[Request] = []
        while len(drawn) < count:
            length, max_tokens = sizes(self._rng)
            prompt = self._prompt(length, drawn, answer)
            drawn.append(Request(tuple(prompt), self._params(prompt, max_tokens), self._eos))
        return drawn

    def _prompt(self, length: int, drawn: Sequence[Request], answer: Callable[[Request], Sequence[int]]) -> list[int]:
        rng = self._rng
        kind = rng.random()
        document = rng.choice(self._documents)
        if kind < 0.25 and drawn:  # the next turn of a chat
            before = rng.choice(drawn)
            turn = [*before.prompt, *answer(before)]
            if len(turn) <= max(2 * length, 60):
                return turn + document[: rng.randrange(1, 5)]
        if kind < 0.45 and drawn:  # as an earlier prompt, but for one token
            prompt = [*rng.choice(drawn).prompt, *document][:length]
            prompt[rng.randrange(len(prompt))] = rng.randrange(self._vocab)
            return prompt
        if kind < 0.6:
            return [rng.randrange(self._vocab) for _ in range(length)]
        common = min(length, rng.choice((8, 24, 100, 600)))
        start = rng.randrange(len(document) - length)
        return document[:common] + document[start : start + length - common]

    def _params(self, prompt: Sequence[int], max_tokens: int) -> SamplingParams:
        rng = self._rng
        penalised, biased, stopped = rng.random() < 0.25, rng.random() < 0.25, rng.random() < 0.25
        ids = [rng.randrange(self._vocab) for _ in range(3)] + rng.choices(prompt, k=3)
        return SamplingParams(
            n=rng.choice((1, 1, 1, 1, 1, 2, 3)),
            seed=rng.randrange(-(2**63), 2**64),
            temperature=rng.choice((0.0, 0.0, 1.0, rng.uniform(0.05, 1.5), rng.uniform(0.05, 1.5))),
            top_k=rng.choice((0, 0, 0, 1, 5, 40, 1000)),
            top_p=rng.choice((1.0, 1.0, 0.95, rng.uniform(0.1, 1.0))),
            min_p=rng.choice((0.0, 0.0, 0.0, 0.05, 0.3)),
            repetition_penalty=rng.uniform(0.8, 1.5) if penalised else 1.0,
            presence_penalty=rng.uniform(-2, 2) if penalised else 0.0,
            frequency_penalty=rng.uniform(-2, 2) if penalised else 0.0,
            logit_bias={i: rng.uniform(-20, 20) for i in ids} if biased else {},
            max_tokens=max_tokens,
            min_tokens=rng.randrange(max_tokens + 1) if rng.random() < 0.3 else 0,
            stop_token_ids=tuple(rng.randrange(1000) for _ in range(60)) if stopped else (),
            ignore_eos=rng.random() < 0.4,
            logprobs=rng.choice((None, 0, 0, 1, 5, 20)),
            prompt_logprobs=rng.choice((0, 3)) if rng.random() < 0.12 else None,
        )


def draw_mix(rng: random.Random, requests: Sequence[Request], count: int, fits: int) -> list[Arrival]:
    """About `count` arrivals of requests that take at most `fits` positions; the same request may come more than once."""
    able = [i for i, r in enumerate(requests) if r.length <= fits]
    span = rng.choice((1, 8, 40))
    mix: list[Arrival] = []
    while len(mix) < count:
        choices = requests[at := rng.choice(able)].params.n
        aborts = rng.random() < 0.15
        arrival = Arrival(
            request=at,
            step=rng.randrange(span),
            priority=rng.choice((0, 1, 1, 1, 2)),
            salt=rng.choice(("", "", "", "a", "b")),
            abort_after=rng.randrange(12) if aborts else None,
            abort_choice=rng.randrange(choices) if aborts and rng.random() < 0.5 else None,
        )
        mix.append(arrival)
        if arrival.abort_after is not None and rng.random() < 0.5:  # the client tries again
            again = arrival.step + arrival.abort_after + rng.randrange(1, 4)
            mix.append(replace(arrival, step=again, abort_after=None, abort_choice=None))
    return mix


def short(rng: random.Random) -> tuple[int, int]:
    """A question or a paragraph; frame boundaries are met often."""
    prompt = rng.choice((1, 8, 9, 16, 17, rng.randrange(2, 40), rng.randrange(20, 60), rng.randrange(20, 60), rng.randrange(60, 130)))
    return prompt, rng.randrange(1, 1 + rng.choice((4, 10, 24)))


def talkative(rng: random.Random) -> tuple[int, int]:
    """Little is asked and much is answered: what a small cache cannot keep up with."""
    return rng.randrange(1, 30), rng.randrange(30, 60)


def long(rng: random.Random) -> tuple[int, int]:
    """About the cuts and Gemma's window: 512 and 1024 are crossed by prompt, chunk or output."""
    prompt = rng.choice((500, 505, 511, 512, 513, 520, 700, 1017, 1024, 1025, 1030, rng.randrange(450, 1200)))
    return prompt, rng.randrange(1, 16)


def longer(rng: random.Random) -> tuple[int, int]:
    """So long that heads which keep the first 64 and the latest 256 positions have something to give up."""
    return rng.randrange(500, 1100), rng.randrange(1, 40)
