"""A model's requests, with the answers that they get alone, and trials of them under a setting."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from comparison import Alone, Setting, Trial
from traffic import Request, Traffic, long, longer, short, talkative

from tokenmill.core.errors import KVBudgetTooSmall
from tokenmill.weights.vocabulary import load_tokenizer


class RequestPool:
    """short: of up to 130 tokens and the answers they grow by. talkative: with long answers. long: prompts of about 500 to
    1,200.

    cache: settings of the engines' KV cache. budgets: long requests have less of it than they would fill.
    """

    def __init__(
        self,
        model: Path,
        seed: int,
        n_short: int,
        n_talkative: int,
        n_long: int,
        cache: dict[str, Any] | None = None,
        budgets: bool = False,
    ) -> None:
        self.alone = Alone(model, cache or {})
        traffic = Traffic(seed, load_tokenizer(model))
        self.short = traffic.requests(n_short, short, self.alone.tokens)
        self.talkative = traffic.requests(n_talkative, talkative, self.alone.tokens)
        self.long = traffic.requests(n_long, longer if budgets else long, self.alone.tokens)
        if budgets:
            rng = random.Random(seed)
            self.long = [self._with_budget(request, rng) for request in self.long]

    def _with_budget(self, request: Request, rng: random.Random) -> Request:
        """A budget of about the request's length; more for one that is too short to give up anything."""
        tokens = rng.uniform(0.75, 1.05) * request.length
        while True:
            budget = tokens * self.alone.info.kv_bytes_per_token / 2**20
            limited = replace(request, params=msgspec.structs.replace(request.params, kv_budget_mb=budget))
            try:
                self.alone.answers(limited)
                return limited
            except KVBudgetTooSmall:
                tokens *= 1.1

    def trial(self, setting: Setting, requests: list[Request], mixes: int, arrivals: int, seed: int = 0) -> Trial:
        """Serve mixes of the requests to one engine; every answer must be that of the run alone."""
        trial = Trial(self.alone, setting, seed)
        for _ in range(mixes):
            assert not (found := trial.differences(requests, arrivals)), "\n".join(found)
        return trial

    def search(self, seed: int, cases: int) -> None:
        """Random settings, mostly warm engines, until that many cases have been compared; some preempted, some evicted."""
        rng = random.Random(seed)
        done = preemptions = evictions = 0
        while done < cases:
            setting = Setting.draw(rng)
            requests = [*self.short, *self.long[:3]]
            if setting.frames < 100:
                requests = [*self.talkative, *self.short[:20]]
            elif rng.random() < 0.2:
                requests = self.long
            trial = self.trial(setting, requests, mixes=3, arrivals=rng.randrange(4, 20), seed=done)
            stats = trial.engine.stats()
            done += trial.cases
            preemptions += stats.preemptions
            evictions += stats.evictions
        print(f"{self.alone.info.model}, {self.alone.info.kernels}: {done} cases, {preemptions} preemptions, {evictions} evictions")
        assert preemptions > 0
        assert evictions > 0
