"""The comparison: serve a mix on an engine under some setting, and hold every answer against the request's run alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from traffic import Arrival, Request, draw_mix

from tokenmill.core.config import EngineConfig
from tokenmill.core.messages import Generate
from tokenmill.core.types import FRAME, FinishReason, TokenLogprobs
from tokenmill.engine.build import build_engine
from tokenmill.engine.engine import Engine
from tokenmill.kernels.layout import KVLayout
from tokenmill.models.loader import describe
from tokenmill.models.source import Source

Key = tuple[int, int]
"""(arrival, choice)."""


@dataclass
class Answer:
    """All that came for one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    sparsified_from: int | None = None
    dropped_tokens: list[int] = field(default_factory=list)
    cuts: int = 0
    """How often it was cut off."""


def serve(engine: Engine, requests: Sequence[Request], mix: Sequence[Arrival], cuts: random.Random | None = None) -> dict[Key, Answer]:
    """Play a mix to its end. Afterwards no frame is held, and the engine has checked every frame's owner.

    cuts: draws arrivals that are cut off in the midst and go on as another engine would go on with them."""
    answers: dict[Key, Answer] = {}
    waiting = sorted(range(len(mix)), key=lambda i: mix[i].step, reverse=True)
    aborts = sorted(((a.step + a.abort_after, i) for i, a in enumerate(mix) if a.abort_after is not None), reverse=True)
    lives: dict[int, str] = {}  # of each arrival, the id under which it is served

    def add(i: int, output: dict[int, list[int]] | None = None) -> None:
        arrival, request = mix[i], requests[mix[i].request]
        lives[i] = f"{i}.{int(lives[i].split('.')[1]) + 1 if i in lives else 0}"
        engine.add(
            Generate(
                request_id=lives[i],
                prompt=list(request.prompt),
                params=request.params,
                eos_ids=request.eos_ids,
                priority=arrival.priority,
                cache_salt=arrival.salt,
                output=output or {},
            )
        )

    def cut() -> None:
        unfinished = [key for key, answer in answers.items() if answer.finish_reason is None]
        if unfinished and cuts is not None and cuts.random() < 0.3:
            i = cuts.choice(unfinished)[0]
            choices = [key for key in unfinished if key[0] == i]
            engine.abort(lives[i])
            add(i, {choice: list(answers[i, choice].tokens) for _, choice in choices})
            for key in choices:
                answers[key].cuts += 1

    step = 0
    while waiting or engine.has_work:
        while waiting and mix[waiting[-1]].step <= step:
            i = waiting.pop()
            add(i)
            answers |= {(i, choice): Answer() for choice in range(requests[mix[i].request].params.n)}
        while aborts and aborts[-1][0] <= step:
            _, i = aborts.pop()
            engine.abort(lives[i], mix[i].abort_choice)
        cut()
        for output in engine.step():
            i = int(output.request_id.split(".")[0])
            if output.request_id != lives[i]:
                assert output.finish_reason is FinishReason.ABORT, "what was cut off goes on"
                continue
            answer = answers[i, output.choice]
            assert answer.finish_reason is None, f"arrival {output.request_id} gets more after its end"
            assert output.index == len(answer.tokens), f"arrival {output.request_id} gets token {output.index} after {len(answer.tokens)}"
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs or []
            answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
            answer.finish_reason, answer.stop_token = output.finish_reason, output.stop_token
            answer.cached_tokens = output.cached_tokens
            answer.sparsified_from = output.sparsified_from
            answer.dropped_tokens += output.dropped_tokens or [0] * len(output.tokens)
        step += 1
        assert step < 20_000, "the engine does not come to an end"
    unanswered = [key for key, answer in answers.items() if answer.finish_reason is None]
    assert not unanswered, f"no end came for {unanswered}"
    assert engine.stats().kv_held == 0, "an idle engine holds frames"
    engine.check_integrity()
    return answers


class Alone:
    """Each choice of a request, run with nothing beside it on an engine with default settings that has seen nothing like it.

    One engine runs them all, each under a salt of its own: `fresh` runs one on a new engine. cache: what decides the numbers, the
    format of keys and values and what goes when a budget is used up.
    """

    def __init__(self, model: Path, cache: dict[str, Any]) -> None:
        self.model = model
        self.cache = cache
        self._engine = self._build()
        self.info = self._engine.info
        self._answers: dict[bytes, list[Answer]] = {}
        self._runs = 0

    def answers(self, request: Request) -> list[Answer]:
        """One per choice."""
        key = msgspec.msgpack.encode(request)
        if key not in self._answers:
            self._answers[key] = [self._run(self._engine, request, choice) for choice in range(request.params.n)]
        return self._answers[key]

    def tokens(self, request: Request) -> list[int]:
        """The first choice's."""
        return self.answers(request)[0].tokens

    def fresh(self, request: Request, choice: int) -> Answer:
        return self._run(self._build(), request, choice)

    def _build(self) -> Engine:
        return build_engine(EngineConfig.from_settings(model=str(self.model), **self.cache))

    def _run(self, engine: Engine, request: Request, choice: int) -> Answer:
        self._runs += 1
        engine.add(
            Generate(
                request_id="alone",
                prompt=list(request.prompt),
                params=request.params,
                eos_ids=request.eos_ids,
                cache_salt=f"alone {self._runs}",
            )
        )
        for other in range(request.params.n):
            if other != choice:
                engine.abort("alone", other)
        answer = Answer()
        while engine.has_work:
            for output in engine.step():
                if output.choice == choice:
                    answer.tokens += output.tokens
                    answer.logprobs += output.logprobs or []
                    answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
                    answer.finish_reason, answer.stop_token = output.finish_reason, output.stop_token
                    answer.cached_tokens = output.cached_tokens
                    answer.sparsified_from = output.sparsified_from
                    answer.dropped_tokens += output.dropped_tokens or [0] * len(output.tokens)
        assert answer.cached_tokens == 0, "a run alone found its prompt in the cache"
        return answer


@dataclass(frozen=True)
class Setting:
    """What an engine is built with. frames: of the KV pool. drafts: the method of speculation, of up to draft_tokens; drafter: the draft
    model, None for the model itself. cuts: answers are cut off and go on. Its text is enough to build the same engine again, but for
    who drafts and how prompts are cut."""

    max_batch_size: int = 16
    chunk_size: int = 512
    chunked: bool = True
    block_size: int | str = "dynamic"
    sharing: bool = True
    frames: int = 512
    threads: int = 2
    drafts: str = field(default="none", repr=False)
    draft_tokens: int = field(default=12, repr=False)
    drafter: Path | None = field(default=None, repr=False)
    cuts: bool = field(default=False, repr=False)
    scheduler: str = field(default="mixed", repr=False)

    @classmethod
    def draw(cls, rng: random.Random) -> Setting:
        return cls(
            max_batch_size=rng.randrange(1, 17),
            chunk_size=rng.choice((16, 24, 63, 128, 500, 512, 1024, 2048, rng.randrange(16, 2049))),
            chunked=rng.random() < 0.8,
            block_size=rng.choice((8, 16, 32, 64, "dynamic", "dynamic")),
            sharing=rng.random() < 0.75,
            frames=rng.choice((24, 24, 32, 48, 96, 200, 512, 512)),
            threads=rng.choice((1, 2, 2, 3)),
        )

    def build(self, model: Path, cache: dict[str, Any], kv_bytes_per_token: int) -> Engine:
        settings: dict[str, Any] = {
            "max_batch_size": self.max_batch_size,
            "chunk_size": self.chunk_size,
            "enable_chunked_prefill": self.chunked,
            "threads": self.threads,
            "scheduler": self.scheduler,
            "block_manager_config": {"block_size": self.block_size, "enable_prefix_sharing": self.sharing},
        }
        frame_bytes = FRAME * kv_bytes_per_token
        if self.drafts != "none":
            settings["speculative_config"] = {"method": self.drafts, "num_speculative_tokens": self.draft_tokens}
        if self.drafts in ("draft", "combined"):
            settings["speculative_config"]["model"] = str(self.drafter or model)
            frame_bytes += frame_bytes if self.drafter is None else _frame_bytes(self.drafter)
        memory = {"memory_budget_gb": (self.frames + 0.5) * frame_bytes / 2**30}
        settings |= cache | {"kv_cache_config": cache.get("kv_cache_config", {}) | memory}
        engine = build_engine(EngineConfig.from_settings(model=str(model), **settings))
        assert engine.info.kv_bytes // frame_bytes == self.frames
        engine._runner._tape.fill_kv(0xFF)  # what was never written is NaN
        return engine


def _frame_bytes(model: Path) -> int:
    """Of a frame of bf16."""
    _, program = describe(Source.open(model))
    return KVLayout.single(program).frame_bytes(program.shape.head_dim)


class Trial:
    """One engine under a setting, to which mixes are served one after the other; the later ones find its cache warm.

    The mixes follow from setting and seed.
    """

    def __init__(self, alone: Alone, setting: Setting, seed: int = 0) -> None:
        self.engine = setting.build(alone.model, alone.cache, alone.info.kv_bytes_per_token)
        self.cases = 0
        self.cuts = 0
        self._alone = alone
        drafts = "" if setting.drafts == "none" else f", drafts by {setting.drafts}"
        self._name = f"{setting}, {alone.cache}, seed {seed}{drafts}"
        self._setting = setting
        self._rng = random.Random(self._name)
        self._cached: dict[str, list[list[int]]] = {}

    def differences(self, requests: Sequence[Request], arrivals: int) -> list[str]:
        """Serve one more mix; says where an answer differs from the run alone, or found more in the cache than can be there."""
        mix = draw_mix(self._rng, requests, arrivals, self.engine.info.max_model_len)
        answers = serve(self.engine, requests, mix, self._rng if self._setting.cuts else None)
        self.cases += len(answers)
        self.cuts += sum(answer.cuts for answer in answers.values())
        found = []
        texts = {key: [*requests[mix[key[0]].request].prompt, *answer.tokens] for key, answer in answers.items()}
        for key, answer in answers.items():
            arrival, request = mix[key[0]], requests[mix[key[0]].request]
            expected = self._alone.answers(request)[key[1]]
            others = [text for other, text in texts.items() if other != key and mix[other[0]].salt == arrival.salt]
            why = _difference(answer, expected, arrival.abort_after is not None and arrival.abort_choice in (None, key[1]))
            most = _reusable(request, [*others, *self._cached.get(arrival.salt, [])]) if self._setting.sharing else 0
            if answer.cached_tokens > most and not answer.cuts:
                why = f"{answer.cached_tokens} tokens came from the cache, which can hold {most}"
            if why:
                kernels = self.engine.info.kernels
                found.append(f"{self._name}, {kernels}: arrival {key[0]}, choice {key[1]}: {why}\n  {arrival}\n  {request}")
        for key, text in texts.items():
            self._cached.setdefault(mix[key[0]].salt, []).append(text)
        return found


def _difference(answer: Answer, expected: Answer, aborted: bool) -> str:
    tokens, logprobs = expected.tokens, expected.logprobs
    if aborted and answer.finish_reason is FinishReason.ABORT:
        tokens, logprobs = tokens[: len(answer.tokens)], logprobs[: len(answer.logprobs)]
    elif (answer.finish_reason, answer.stop_token) != (expected.finish_reason, expected.stop_token):
        return f"ended by {answer.finish_reason} {answer.stop_token}, alone by {expected.finish_reason} {expected.stop_token}"
    if answer.tokens != tokens:
        return f"tokens {answer.tokens}, alone {tokens}"
    if answer.logprobs != logprobs:
        at = next(i for i, (a, b) in enumerate(zip(answer.logprobs, logprobs, strict=True)) if a != b)
        return f"token {at} has log-probability {answer.logprobs[at]}, alone {logprobs[at]}"
    kept = (answer.sparsified_from, answer.dropped_tokens), (expected.sparsified_from, expected.dropped_tokens)
    if not aborted and kept[0] != kept[1]:
        return f"sparsified from, and positions dropped: {kept[0]}, alone {kept[1]}"
    if answer.prompt_logprobs != expected.prompt_logprobs and answer.tokens:
        return f"prompt log-probabilities {answer.prompt_logprobs}, alone {expected.prompt_logprobs}"
    return ""


def _reusable(request: Request, texts: Sequence[Sequence[int]]) -> int:
    """Tokens of the prompt, in whole frames and less than all of it, that any of the texts begins with."""
    if request.params.prompt_logprobs is not None:
        return 0
    common = 0
    for text in texts:
        limit = min(len(text), len(request.prompt) - 1)
        while common < limit and list(text[: common + 1]) == list(request.prompt[: common + 1]):
            common += 1
    return common // FRAME * FRAME
