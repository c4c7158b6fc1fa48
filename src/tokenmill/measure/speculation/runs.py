"""Engines of all methods over the same weights answer the same prompts in turn, and every step of theirs is looked at."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError, InvalidRequest, TokenmillError
from tokenmill.core.messages import Generate, SequenceOutput
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.loading import Loaded
from tokenmill.measure.report import Tell
from tokenmill.speculate.costs import StepCosts
from tokenmill.text.chat import ChatTemplate, encode_chat
from tokenmill.weights.vocabulary import load_tokenizer

PLAIN = "none"
"""The method without drafts."""


class WatchedCosts(StepCosts):
    """An engine's own, to be read. odds: of the drafts that were given last."""

    def __init__(self) -> None:
        super().__init__()
        self.odds: list[tuple[float, ...]] = []
        self._flat: int | None = None

    @contextmanager
    def flattened(self, rows: int) -> Iterator[None]:
        """Inside, every step is believed to cost what one of so many rows does, and drafts are as long as they can be."""
        self._flat = rows
        try:
            yield
        finally:
            self._flat = None

    def seconds(self, rows: int) -> float:
        return super().seconds(rows if self._flat is None else self._flat)

    def choose(self, odds: Sequence[Sequence[float]], rows: int, margin: float) -> list[int]:
        lengths = super().choose(odds, rows, margin) if self._flat is None else list(map(len, odds))
        self.odds = [tuple(each[:length]) for each, length in zip(odds, lengths, strict=True)]
        return lengths


class Verified(NamedTuple):
    """What a step did for a stream. odds: of the tokens that were drafted, each given those before it. new: tokens that came out."""

    odds: tuple[float, ...]
    new: int

    @property
    def drafted(self) -> int:
        return len(self.odds)


@dataclass(frozen=True)
class Step:
    """Of decoding. started: seconds until it was started, with the proposer's. computed: from there to its tokens."""

    started: float
    computed: float
    streams: Mapping[int, Verified]

    @property
    def seconds(self) -> float:
        return self.started + self.computed

    @property
    def rows(self) -> int:
        return len(self.streams) + self.drafted

    @property
    def drafted(self) -> int:
        return sum(verified.drafted for verified in self.streams.values())


@dataclass
class Turn:
    """What one method did with all prompts of a case, once. answers: token ids, by prompt. groups: of prompts that were answered
    together, the steps in which each of them had had its first token before."""

    answers: list[list[int]] = field(default_factory=list)
    groups: list[list[Step]] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        return [step for group in self.groups for step in group]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def tokens(self) -> int:
        return sum(verified.new for step in self.steps for verified in step.streams.values())


@dataclass
class Case:
    """A workload with so many streams. probes: of each method, a turn with drafts as long as they can be. turns: by method, one for
    each round."""

    workload: str
    streams: int
    probes: dict[str, Turn]
    turns: dict[str, list[Turn]]


class Method:
    """An engine, for one group of requests at a time. costs: as it knows them; with `PLAIN` nothing."""

    def __init__(self, name: str, config: EngineConfig, loaded: Loaded) -> None:
        self.name = name
        self.costs = WatchedCosts()
        self._engine = build_engine(config, loaded, costs=self.costs)
        self.info = self._engine.info

    def take(self, groups: Sequence[Sequence[Generate]], salt: str) -> Turn:
        """Answer one group after the other. Nothing of what was answered under another salt is of use."""
        turn = Turn()
        for number, group in enumerate(groups):
            self._group([msgspec.structs.replace(request, cache_salt=f"{salt} {number}") for request in group], turn)
        return turn

    def close(self) -> None:
        self._engine.close()

    def _group(self, group: Sequence[Generate], turn: Turn) -> None:
        """The prompts are computed before, so that all streams decode together from the first step on."""
        for request in group:
            self._engine.add(msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, max_tokens=1)))
        while self._engine.has_work:
            self._step()
        for request in group:
            self._engine.add(request)
        numbers = {request.request_id: number for number, request in enumerate(group)}
        answers: list[list[int]] = [[] for _ in group]
        steps: list[Step] = []
        while self._engine.has_work:
            counts = all(answers)
            started, computed, outputs = self._step()
            for output in outputs:
                answers[numbers[output.request_id]] += output.tokens
            if counts and outputs:
                streams = zip(outputs, self._odds(outputs), strict=True)
                found = {numbers[output.request_id]: Verified(odds, len(output.tokens)) for output, odds in streams}
                steps.append(Step(started, computed, found))
        turn.answers += answers
        turn.groups.append(steps)

    def _odds(self, outputs: Sequence[SequenceOutput]) -> list[tuple[float, ...]]:
        """Of what was drafted for each; drafts are asked for in the order in which outputs come."""
        odds = self.costs.odds or [()] * len(outputs)
        assert [len(each) for each in odds] == [output.drafted for output in outputs], "drafts and outputs come in another order"
        return odds

    def _step(self) -> tuple[float, float, list[SequenceOutput]]:
        """One whole step: `Engine.step` would leave the next one in flight. Seconds of its two halves, and what came out of it."""
        self.costs.odds = []
        begun = time.perf_counter()
        self._engine.start_step()
        started = time.perf_counter()
        outputs = self._engine.finish_step()
        return started - begun, time.perf_counter() - started, outputs


def chat_requests(path: Path, prompts: Sequence[str], tokens: int, temperature: float, seed: int) -> list[Generate]:
    """Each prompt is a user's message of a conversation of its own. Raises `InvalidRequest` without a chat template."""
    tokenizer = load_tokenizer(path)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_text, tokenizer.eos_text)
    ends = tuple(sorted(tokenizer.eos_ids))
    found = []
    for number, prompt in enumerate(prompts):
        ids = encode_chat(tokenizer, template, [{"role": "user", "content": prompt}])
        params = SamplingParams(temperature=temperature, seed=seed + number, max_tokens=tokens).check()
        found.append(Generate(request_id=str(number), prompt=ids, params=params, eos_ids=ends))
    return found


def open_methods(configs: Mapping[str, EngineConfig], loaded: Loaded, open_engines: ExitStack) -> dict[str, Method]:
    """`PLAIN` first. Raises `ConfigError` if all streams at their longest do not fit into an engine's KV pool."""
    methods = {name: open_engines.enter_context(closing(Method(name, config, loaded))) for name, config in configs.items()}
    for name, method in methods.items():
        config = configs[name]
        need = config.max_batch_size * (config.max_model_len or 0)
        if method.info.kv_tokens < need:
            raise ConfigError(
                f"{config.max_batch_size} streams of {config.max_model_len} tokens need {need} tokens of KV cache, and there is room for "
                f"{method.info.kv_tokens}: lower --streams or --tokens"
            )
    return methods


def measure_case(methods: Mapping[str, Method], workload: str, streams: int, requests: Sequence[Generate], rounds: int, tell: Tell) -> Case:
    """A round of probes, which warms up, and then those that count. Raises `TokenmillError` where an answer is not the plain one."""
    groups = [requests[at : at + streams] for at in range(0, len(requests), streams)]
    case = Case(workload, streams, {}, {name: [] for name in methods})
    for number in range(rounds + 1):
        tell(f"{workload}, {streams} streams: round {number} of {rounds}")
        salt = f"{workload} {streams} {number}"
        for method in _rotated(list(methods.values()), number):
            with method.costs.flattened(streams) if number == 0 else nullcontext():
                turn = method.take(groups, salt)
            if number:
                case.turns[method.name].append(turn)
            else:
                case.probes[method.name] = turn
            if not turn.steps:
                raise InvalidRequest(f"{workload}: no answer has a second token, so that there is nothing to measure")
            _check(workload, streams, method.name, turn.answers, case.probes[PLAIN].answers)
    return case


def _rotated(methods: Sequence[Method], by: int) -> Iterator[Method]:
    at = by % len(methods)
    yield from methods[at:]
    yield from methods[:at]


def _check(workload: str, streams: int, method: str, answers: Sequence[list[int]], plain: Sequence[list[int]]) -> None:
    for number, (answer, expected) in enumerate(zip(answers, plain, strict=True)):
        if answer != expected:
            at = next((i for i, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b), min(len(answer), len(expected)))
            raise TokenmillError(
                f"{method} changed an answer: {workload}, {streams} streams, prompt {number}: from token {at} on it is "
                f"{answer[at : at + 4]} instead of {expected[at : at + 4]}"
            )
