"""Who drafts for the tests of speculation, and what came of it."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

from request_pool import RequestPool

from tokenmill.engine.engine import Engine
from tokenmill.speculate.draft import Draft
from tokenmill.speculate.proposer import Wish, Worth

METHODS = ("ngram", "suffix", "draft", "combined")


class Oracle:
    """Knows the answers, and errs on purpose: so that drafts of all lengths are right, wrong, or right to some place."""

    name = "oracle"
    writes = False
    invested = 0.0

    def __init__(self, pool: RequestPool, seed: int) -> None:
        self._rng = random.Random(seed)
        self._pool = pool

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        return [self._draft(wish) for wish in wishes]

    def forget(self, key: Hashable) -> None:
        pass

    def _draft(self, wish: Wish) -> Draft:
        prompt, output = tuple(wish.token_ids[: wish.prompt_len]), wish.token_ids[wish.prompt_len :]
        requests = [r for r in (*self._pool.short, *self._pool.talkative, *self._pool.long) if r.prompt == prompt]
        known = [answer.tokens for request in requests for answer in self._pool.alone.answers(request)]
        fitting = [tokens for tokens in known if tokens[: len(output)] == output] or [output]
        guess = self._rng.choice(fitting)[len(output) : len(output) + self._rng.randint(0, wish.most)]
        if guess and self._rng.random() < 0.6:
            guess[self._rng.randrange(len(guess))] = self._rng.randrange(1000)
        return Draft(tuple(guess), (0.9,) * len(guess))


def ask_an_oracle(engine: Engine, pool: RequestPool) -> None:
    assert engine.speculator is not None
    engine.speculator._proposer = Oracle(pool, 3)


def drafted(engine: Engine) -> tuple[int, int]:
    """Tokens that were verified, and that were right."""
    assert engine.speculator is not None
    total = engine.speculator.total
    return sum(total.drafted), sum(total.accepted)
