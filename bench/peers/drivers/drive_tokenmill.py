"""tokenmill through its engine: admission, plan, tape, native sampling and commit are all in the figures."""

from __future__ import annotations

import itertools
from importlib.metadata import version
from pathlib import Path

from lines import seconds_per_step, seconds_to_first, serve

from tokenmill.core.config import BlockManagerConfig, EngineConfig, KVCacheConfig
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.weights.vocabulary import load_tokenizer


class Tokenmill:
    def version(self) -> str:
        return version("tokenmill")

    def prepare(self, model: str, folder: str) -> str:
        return model

    def load(self, model: str, threads: int) -> None:
        config = EngineConfig(
            model=model,
            threads=threads,
            max_model_len=1024,
            block_manager_config=BlockManagerConfig(enable_prefix_sharing=False),
            kv_cache_config=KVCacheConfig(memory_budget_gb=1),
        )
        self._engine = build_engine(config)
        self._tokenizer = load_tokenizer(Path(model))
        self._ids = itertools.count()

    def complete(self, prompt: str, tokens: int) -> str:
        self._add(self._tokenizer.encode(prompt), tokens)
        made: list[int] = []
        while self._engine.has_work:
            for output in self._engine.step():
                made += output.tokens
        return self._tokenizer.decode(made)

    def prefill(self, prompt: list[int]) -> float:
        self._add(prompt, 1)
        return seconds_to_first(self._step)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        requests = [self._add(prompt, 512) for prompt in prompts]
        seconds = seconds_per_step(self._step, len(prompts), steps)
        for request in requests:
            self._engine.abort(request)
        self._engine.step()
        return seconds

    def _add(self, prompt: list[int], tokens: int) -> str:
        name = str(next(self._ids))
        params = SamplingParams(temperature=0.0, max_tokens=tokens, seed=0, ignore_eos=True)
        self._engine.add(Generate(request_id=name, prompt=prompt, params=params, eos_ids=()))
        return name

    def _step(self) -> list[str]:
        """The request of each token."""
        return [output.request_id for output in self._engine.step() for _ in output.tokens]


if __name__ == "__main__":
    serve(Tokenmill())
