"""Engines of all methods over the same weights answer the same prompts in turn, and every step of theirs is looked at."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError, InvalidRequest, TokenmillError
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.loading import Loaded
from tokenmill.measure.report import Tell
from tokenmill.speculate.balance import Balance
from tokenmill.speculate.costs import WEIGHT, StepCosts
from tokenmill.text.chat import ChatTemplate, encode_chat
from tokenmill.weights.vocabulary import load_tokenizer

PLAIN = "none"
"""The method without drafts."""


DEAR = 1e12
"""Steps of the most rows, which one is believed to take while drafts are to be as long as they can be."""


class FreeRows(StepCosts):
    """Others in disguise, which go on learning: further rows cost nothing, and a step so much that a proposer's time does not matter."""

    def __init__(self, known: StepCosts, most_rows: int) -> None:
        super().__init__()
        self._under, self._most_rows = known, most_rows

    @property
    def known(self) -> bool:
        return self._under.known

    def observe(self, rows: int, seconds: float, weight: float = WEIGHT) -> None:
        self._under.observe(rows, seconds, weight)

    def seconds(self, rows: int) -> float:
        return DEAR * self._under.seconds(self._most_rows)


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
    together, the steps in which each of them had had its first token before, and none its last: with fewer streams it is another case."""

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

    @property
    def token_seconds(self) -> float:
        """That one takes."""
        return self.seconds / self.tokens


@dataclass
class Case:
    """A workload with so many streams. probes: of each method, a turn with drafts as long as they can be. turns: by method, one for
    each round."""

    workload: str
    streams: int
    probes: dict[str, Turn]
    turns: dict[str, list[Turn]]


class Method:
    """An engine, for one group of requests at a time."""

    def __init__(self, name: str, config: EngineConfig, loaded: Loaded) -> None:
        self.name = name
        self._engine = build_engine(config, loaded)
        self._most = config.speculative_config.num_speculative_tokens
        self.info = self._engine.info

    @property
    def costs(self) -> StepCosts | None:
        """What its speculator reckons with; None if nothing is drafted."""
        return None if self._engine.speculator is None else self._engine.speculator.costs

    def take(self, group: Sequence[Generate], turn: Turn) -> None:
        """Answer these together. Prompts are computed before, so that all streams decode from the first step on."""
        for request in group:
            self._engine.add(msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, max_tokens=1)))
        while self._engine.has_work:
            self._engine.step()
        for request in group:
            self._engine.add(request)
        numbers = {request.request_id: number for number, request in enumerate(group)}
        answers: list[list[int]] = [[] for _ in group]
        steps: list[Step] = []
        over = False
        while self._engine.has_work:
            counts = all(answers) and not over
            begun = time.perf_counter()
            self._engine.start_step()
            started = time.perf_counter()
            odds = self._odds()
            outputs = self._engine.finish_step()  # `Engine.step` would leave the next one in flight
            ended = time.perf_counter()
            for output in outputs:
                answers[numbers[output.request_id]] += output.tokens
                over |= output.finish_reason is not None
            if counts and outputs:
                found = {
                    numbers[output.request_id]: Verified(odds.get(output.request_id, ())[: output.drafted], len(output.tokens))
                    for output in outputs
                }
                steps.append(Step(started - begun, ended - started, found))
        turn.answers += answers
        turn.groups.append(steps)

    def probe(self, group: Sequence[Generate], turn: Turn) -> None:
        """`take` with drafts as long as they can be, whatever they are worth."""
        speculator = self._engine.speculator
        if speculator is None:
            return self.take(group, turn)
        before = speculator.costs, speculator.balance, speculator.margin
        speculator.costs, speculator.balance, speculator.margin = FreeRows(speculator.costs, len(group) * (1 + self._most)), Balance(), 0.0
        try:
            self.take(group, turn)
        finally:
            speculator.costs, speculator.balance, speculator.margin = before

    def close(self) -> None:
        self._engine.close()

    def _odds(self) -> dict[str, tuple[float, ...]]:
        """Of the drafts of the step in flight, by request."""
        drafts = {} if self._engine.speculator is None else self._engine.speculator.drafts
        return {sequence.request_id: draft.odds for sequence, draft in drafts.items()}


def chat_requests(path: Path, prompts: Sequence[str], tokens: int, temperature: float, seed: int) -> list[Generate]:
    """Each prompt is a user's message of a conversation of its own. tokens: of an answer at most. Raises `InvalidRequest` without a chat
    template."""
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
    """A round of probes, which warms up, and then those that count. In each the methods take turns with every group of requests.

    Raises `TokenmillError` where an answer is not the plain one."""
    case = Case(workload, streams, {}, {name: [] for name in methods})
    for number in range(rounds + 1):
        tell(f"{workload}, {streams} streams: round {number} of {rounds}")
        turns = {name: Turn() for name in methods}
        for at in range(0, len(requests), streams):
            salt = f"{workload} {streams} {number} {at}"  # nothing that was answered under another one is of use
            group = [msgspec.structs.replace(request, cache_salt=salt) for request in requests[at : at + streams]]
            for method in _rotated(list(methods.values()), number + at // streams):
                answer = method.take if number else method.probe
                answer(group, turns[method.name])
        for name, turn in turns.items():
            if not turn.steps:
                raise InvalidRequest(f"{workload}: no answer has a second token, so that there is nothing to measure")
            _check(workload, streams, name, turn.answers, turns[PLAIN].answers)
            if number:
                case.turns[name].append(turn)
            else:
                case.probes[name] = turn
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
