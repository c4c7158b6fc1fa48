"""An engine to talk to, and all that it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import TinyModel

from tokenmill.core.config import EngineConfig, KVCacheConfig
from tokenmill.core.messages import Generate, SequenceOutput
from tokenmill.core.types import FinishReason, SamplingParams, TokenLogprobs
from tokenmill.engine.build import CHECK_VARIABLE, build_engine
from tokenmill.engine.engine import Engine

GIB = 2**30
TINY_FRAME = 8 * 3 * 2 * 32 * 2 * 2
"""Bytes of a frame: positions, layers, key heads, head width, keys and values, bf16."""


@dataclass
class Answer:
    """All outputs of one sequence put together."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0

    def take(self, output: SequenceOutput) -> None:
        assert self.finish_reason is None, "an output came after the last one"
        self.tokens += output.tokens
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.stop_token = output.stop_token
        self.cached_tokens = output.cached_tokens


class Talk:
    """An engine whose outputs are gathered by (request id, choice)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[tuple[str, int], Answer] = {}

    def add(self, request_id: str, prompt: list[int], eos: tuple[int, ...] = (), **settings: Any) -> None:
        settings = {"max_tokens": 8, "temperature": 0.0, "seed": 0, **settings}
        self.engine.add(Generate(request_id=request_id, prompt=prompt, params=SamplingParams(**settings), eos_ids=eos))

    def step(self) -> list[SequenceOutput]:
        return self._take(self.engine.step())

    def finish_step(self) -> list[SequenceOutput]:
        return self._take(self.engine.finish_step())

    def finish(self) -> dict[tuple[str, int], Answer]:
        """Step until nothing is left; returns what came since the last time."""
        while self.engine.has_work:
            self.step()
        assert all(answer.finish_reason for answer in self.answers.values())
        self.engine.check_integrity()
        answers, self.answers = self.answers, {}
        return answers

    def _take(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        for output in outputs:
            self.answers.setdefault((output.request_id, output.choice), Answer()).take(output)
        return outputs

    def ask(self, prompt: list[int], eos: tuple[int, ...] = (), **settings: Any) -> Answer:
        """One request alone."""
        self.add("alone", prompt, eos, **settings)
        return self.finish()["alone", 0]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with 499 tokens and a context of 8,192."""
    return TinyModel(vocab=499, context=8192).write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def build(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Talk]:
    """build(frames=…, **EngineConfig fields): a checked engine, the tiny Llama's unless `model` says otherwise."""
    monkeypatch.setenv(CHECK_VARIABLE, "1")

    def make(frames: int = 512, model: Path = tiny_path, frame_bytes: int = TINY_FRAME, **settings: Any) -> Talk:
        budget = KVCacheConfig(memory_budget_gb=(frames + 0.5) * frame_bytes / GIB)
        return Talk(build_engine(EngineConfig(**{"model": str(model), "threads": 2, "kv_cache_config": budget, **settings})))

    return make


@pytest.fixture(scope="module")
def talk(smollm2_path: Path) -> Talk:
    """One SmolLM2 for the tests of a module that need no settings of their own."""
    return Talk(build_engine(EngineConfig(model=str(smollm2_path), threads=2, kv_cache_config=KVCacheConfig(memory_budget_gb=0.2))))
