"""Loads against a slow twin that adds everything up anew."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from workers import worker

from tokenmill.cluster.load import Load, Loads
from tokenmill.core.roles import Role


@dataclass
class SlowPart:
    key: int
    worker_id: str
    role: Role
    choices: int
    uncomputed: int
    kv: int
    waits: bool

    @property
    def active(self) -> bool:
        if self.role is Role.PREFILL:
            return self.uncomputed > 0
        return not self.waits


class SlowLoads:
    def __init__(self) -> None:
        self.parts: list[SlowPart] = []
        self.foreign: dict[str, tuple[int, int]] = {}

    def own(self, worker_id: str) -> tuple[int, int]:
        mine = [part for part in self.parts if part.worker_id == worker_id]
        return sum(part.choices for part in mine), sum(part.kv for part in mine)

    def figures(self, worker_id: str) -> tuple[int, int, int, int, int]:
        mine = [part for part in self.parts if part.worker_id == worker_id]
        sequences, kv = self.own(worker_id)
        foreign_sequences, foreign_kv = self.foreign[worker_id]
        return (
            sequences + foreign_sequences,
            sum(part.choices for part in mine if part.role is not Role.PREFILL) + foreign_sequences,
            sum(part.choices for part in mine if part.active),
            sum(part.uncomputed for part in mine),
            kv + foreign_kv,
        )


def figures(load: Load) -> tuple[int, int, int, int, int]:
    return load.sequences, load.streams, load.active, load.queued_prompt_tokens, load.kv_tokens


@pytest.mark.parametrize("seed", range(30))
def test_random_gifts_progress_ends_and_reports_agree_with_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    loads, twin, names = Loads(), SlowLoads(), [f"w{number}" for number in range(4)]
    for number in range(600):
        known = rng.choice(twin.parts) if twin.parts else None
        name, there = rng.choice(names), list(twin.foreign)
        match rng.choice("joingggggggssrrroooooeeeeepp"):
            case "j" if rng.random() < 0.3:
                lost = loads.join(worker(name))
                assert lost == [part.key for part in twin.parts if part.worker_id == name], f"seed {seed}"
                twin.parts = [part for part in twin.parts if part.worker_id != name]
                twin.foreign[name] = (0, 0)
            case "n" if rng.random() < 0.1:
                lost = loads.leave(name)
                assert lost == [part.key for part in twin.parts if part.worker_id == name], f"seed {seed}"
                twin.parts = [part for part in twin.parts if part.worker_id != name]
                twin.foreign.pop(name, None)
            case "g" if there:
                name, role, choices = rng.choice(there), rng.choice(list(Role)), rng.choice([1, 1, 1, 4])
                prompt = rng.randrange(1, 5000)
                cached = rng.choice([0, 0, rng.randrange(prompt + 1), prompt])
                loads.give(number, name, role, prompt_tokens=prompt, cached_tokens=cached, choices=choices)
                decode = role is Role.DECODE
                twin.parts.append(SlowPart(number, name, role, choices, 0 if decode else prompt - cached, prompt - cached, decode))
            case "s" if known:
                loads.start(known.key)
                known.waits = False
            case "r" if known:
                known.uncomputed, known.waits = rng.choice([0, rng.randrange(3000)]), False
                loads.remaining(known.key, known.uncomputed)
            case "o" if known:
                tokens = rng.randrange(1, 5)
                loads.output(known.key, tokens)
                known.uncomputed, known.waits = 0, False
                known.kv += tokens
            case "e" if known:
                assert loads.end(known.key)
                twin.parts.remove(known)
            case "p":
                sequences, kv = rng.randrange(60), rng.randrange(100_000)
                loads.report(name, sequences=sequences, kv_tokens=kv)
                if name in twin.foreign:
                    own_sequences, own_kv = twin.own(name)
                    twin.foreign[name] = (max(0, sequences - own_sequences), max(0, kv - own_kv))
        for there_now in twin.foreign:
            assert figures(loads.by_worker[there_now]) == twin.figures(there_now), f"seed {seed}, step {number}"
        assert len(loads) == len(twin.parts)
        assert {part.key: part.worker_id for part in twin.parts} == {part.key: loads.where(part.key) for part in twin.parts}


def test_a_request_that_has_ended_leaves_nothing() -> None:
    loads = Loads()
    loads.join(worker())
    for role in Role:
        loads.give(role, "w0", role, prompt_tokens=100, choices=2)
        loads.output(role, 7)
        assert loads.end(role)
        assert not loads.end(role)
    assert figures(loads.by_worker["w0"]) == (0, 0, 0, 0, 0)


def test_a_prompt_computed_for_another_worker_is_work_until_it_is_computed_and_kept_until_it_ends() -> None:
    loads = Loads()
    loads.join(worker(chunk_size=512))
    loads.give("a", "w0", Role.PREFILL, prompt_tokens=1000)
    load = loads.by_worker["w0"]
    assert (load.step_rows, load.streams, load.queued_prompt_tokens) == (513, 0, 1000)
    loads.remaining("a", 488)
    assert load.queued_prompt_tokens == 488
    loads.remaining("a", 0)
    assert (load.step_rows, load.kv_tokens, load.sequences) == (0, 1000, 1)


def test_a_part_that_waits_for_frames_is_no_work_until_it_starts_or_computes_itself() -> None:
    loads = Loads()
    loads.join(worker(chunk_size=512))
    load = loads.by_worker["w0"]
    for number, begin in enumerate((lambda: loads.start(0), lambda: loads.remaining(1, 600), lambda: loads.output(2))):
        loads.give(number, "w0", Role.DECODE, prompt_tokens=600)
        assert (load.step_rows, load.streams) == (0, 1)
        begin()
        assert load.step_rows == (513 if number == 1 else 1)
        loads.end(number)


def test_a_report_counts_only_what_the_gateway_has_not_given() -> None:
    loads = Loads()
    loads.join(worker())
    load = loads.by_worker["w0"]
    loads.give("a", "w0", Role.MIXED, prompt_tokens=100)
    loads.report("w0", sequences=1, kv_tokens=100)
    assert (load.sequences, load.streams, load.kv_tokens) == (1, 1, 100)
    loads.report("w0", sequences=4, kv_tokens=350)
    assert (load.sequences, load.streams, load.kv_tokens) == (4, 4, 350)
    loads.give("b", "w0", Role.MIXED, prompt_tokens=50)
    assert (load.sequences, load.kv_tokens) == (5, 400)
    loads.report("w0", sequences=0, kv_tokens=0)  # older than what was just given
    assert (load.sequences, load.streams, load.kv_tokens) == (2, 2, 150)


def test_news_of_parts_of_a_worker_that_has_left_changes_nothing() -> None:
    loads = Loads()
    loads.join(worker())
    loads.give("a", "w0", Role.MIXED, prompt_tokens=100)
    assert loads.join(worker(boot="second")) == ["a"]
    loads.start("a")
    loads.remaining("a", 5)
    loads.output("a")
    assert not loads.end("a")
    loads.report("nobody", sequences=1, kv_tokens=1)
    assert figures(loads.by_worker["w0"]) == (0, 0, 0, 0, 0)
    assert loads.where("a") is None


def test_room_ends_with_the_rows_of_a_batch_or_with_the_pool() -> None:
    loads = Loads()
    loads.join(worker(max_batch_size=2, kv_tokens=1000))
    load = loads.by_worker["w0"]
    loads.give("a", "w0", Role.MIXED, prompt_tokens=600)
    assert not load.lacks_room(400)
    assert load.lacks_room(401)
    loads.give("b", "w0", Role.PREFILL, prompt_tokens=1)
    assert load.lacks_room(0)


def test_giving_the_same_part_twice_is_our_own_fault() -> None:
    loads = Loads()
    loads.join(worker())
    loads.give("a", "w0", Role.MIXED, prompt_tokens=1)
    with pytest.raises(AssertionError, match="given already"):
        loads.give("a", "w0", Role.MIXED, prompt_tokens=1)
    with pytest.raises(AssertionError, match="2 of 1 tokens cached"):
        loads.give("b", "w0", Role.MIXED, prompt_tokens=1, cached_tokens=2)
