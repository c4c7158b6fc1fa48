"""A model's requests, with the answers that they get alone, and trials of them under a setting."""

from __future__ import annotations

import random
from pathlib import Path

from comparison import Alone, Setting, Trial
from traffic import Request, Traffic, long, short, talkative

from tokenmill.weights.vocabulary import load_tokenizer


class RequestPool:
    """short: of up to 130 tokens and the answers they grow by. talkative: with long answers. long: prompts of about 500 to 1,200."""

    def __init__(self, model: Path, seed: int, n_short: int, n_talkative: int, n_long: int) -> None:
        self.alone = Alone(model)
        self._traffic = Traffic(seed, load_tokenizer(model))
        self.short = self._traffic.requests(n_short, short, self.alone.tokens)
        self.talkative = self._traffic.requests(n_talkative, talkative, self.alone.tokens)
        self.long = self._traffic.requests(n_long, long, self.alone.tokens)

    def trial(self, setting: Setting, requests: list[Request], mixes: int, arrivals: int) -> Trial:
        """Serve mixes of the requests to one engine; every answer must be that of the run alone."""
        trial = Trial(self.alone, setting)
        for _ in range(mixes):
            assert not (found := self.differences(trial, requests, arrivals)), "\n".join(found)
        return trial

    def differences(self, trial: Trial, requests: list[Request], arrivals: int) -> list[str]:
        """Serve one more mix to a trial's engine; says where it differs."""
        return trial.differences(requests, self._traffic.mix(requests, arrivals, trial.engine.info.max_model_len))

    def search(self, seed: int, cases: int) -> None:
        """Random settings, mostly warm engines, until that many cases have been compared; some preempted, some evicted."""
        rng = random.Random(seed)
        done = preemptions = evictions = 0
        while done < cases:
            setting = Setting.draw(rng)
            tiny = setting.frames < 100
            requests = [*self.short, *self.talkative] if tiny else self.long if rng.random() < 0.2 else [*self.short, *self.long[:3]]
            trial = self.trial(setting, requests, mixes=3, arrivals=rng.randrange(4, 20))
            stats = trial.engine.stats()
            done += trial.cases
            preemptions += stats.preemptions
            evictions += stats.evictions
        print(f"{self.alone.info.model}, {self.alone.info.kernels}: {done} cases, {preemptions} preemptions, {evictions} evictions")
        assert preemptions > 0
        assert evictions > 0
