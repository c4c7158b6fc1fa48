"""Scheduler and KV manager under random load in tiny pools, with a toy model in place of the real one.

The toy model writes one key per KV group and position, and each depends on the keys of all groups that its position can see, which it
reads through the page tables from a toy memory of frames. So any frame that is shared, evicted, reused, dropped or written wrongly
changes tokens, and each sequence is compared with the same model run alone over plain lists.
"""

import random
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

import numpy as np
from abroad import Abroad

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.errors import KVBudgetTooSmall
from tokenmill.core.types import FRAME, SamplingParams, Streaming
from tokenmill.engine.transit import Transit
from tokenmill.kv.budget import WEIGHED, Ladder, SparsePolicy
from tokenmill.kv.footprint import Footprint
from tokenmill.kv.groups import KVGroup, Retention, Whole, Window
from tokenmill.kv.manager import KVManager
from tokenmill.kv.prefix_tree import MISS
from tokenmill.kv.table import PageTable
from tokenmill.scheduler.plan import Limits, Work
from tokenmill.scheduler.scheduler import Scheduler, Step
from tokenmill.scheduler.sequence import Sequence

MASK = (1 << 61) - 1
NOTHING_GOES = SparsePolicy()
END = 0  # the token that ends a sequence
DRAFT = 12  # tokens at most


@dataclass(frozen=True)
class Setting:
    """A model's groups, what its sequences do at their budgets, and the range of budgets, in frames of positions in every group."""

    rules: tuple[Retention, ...] = (Whole(),)
    policy: SparsePolicy = NOTHING_GOES
    budgets: tuple[int, int] | None = None

    @property
    def groups(self) -> list[KVGroup]:
        return [KVGroup(f"group {number}", rule, ((number, 0),)) for number, rule in enumerate(self.rules)]


def mixed(*numbers: int) -> int:
    total = 0
    for number in numbers:
        total = ((total ^ number) * 0x9E3779B97F4A7C15 + 12_345) & MASK
        total ^= total >> 29
    return total


def visible(rule: Retention, position: int, sparse: bool) -> list[range]:
    """The positions that a row looks at, itself apart."""
    if isinstance(rule, Window):
        return [range(max(0, position - rule.tokens + 1), position)]
    if isinstance(rule, Streaming) and sparse:
        recent = max(0, position - rule.recent + 1)
        return [range(min(rule.sinks, recent)), range(recent, position)]
    return [range(position)]


def attend(rules: Ordered[Retention], keys: Ordered[list[int]], position: int, token: int, sparse: bool) -> int:
    """What the model makes of a row. keys: per group and position; 0 where there is none, which adds nothing."""
    sums = [sum(sum(keys[group][r.start : r.stop]) for r in visible(rule, position, sparse)) for group, rule in enumerate(rules)]
    return mixed(token, *sums)


def weight(row: int, keys: list[int], frame: int) -> int:
    """How much a row attends to a frame: one of few numbers, so that frames are often equal; none where nothing is left."""
    seen = sum(keys[frame * FRAME : (frame + 1) * FRAME])
    return 1 + mixed(row, seen) % 3 if seen else 0


def sample(row: int, seed: int) -> int:
    """A token from a vocabulary of 4, so that answers collide with each other and with prompts; END is rare."""
    drawn = mixed(row, seed)
    return END if drawn >> 40 & 31 == 0 else 1 + (drawn >> 20) % 3


def compute(rules: Ordered[Retention], tokens: list[int]) -> list[list[int]]:
    """The keys of all positions, per group, without frames."""
    keys: list[list[int]] = [[] for _ in rules]
    for position, token in enumerate(tokens):
        row = attend(rules, keys, position, token, sparse=False)
        for group, of_group in enumerate(keys):
            of_group.append(mixed(row, group) | 1)
    return keys


def alone(setting: Setting, prompt: list[int], seed: int, max_tokens: int, budget: int | None) -> list[int]:
    """The tokens of one sequence, computed one at a time without frames."""
    rules = setting.rules
    ladder = None if budget is None else Ladder(budget, setting.policy, Footprint.of(setting.groups))
    keys: list[list[int]] = [[] for _ in rules]
    tokens, passed, weights = list(prompt), 0, dict[int, int]()
    while True:
        position = len(keys[0])
        rung = ladder.rung(passed) if ladder else None
        row = attend(rules, keys, position, tokens[position], passed > 0)
        for group, of_group in enumerate(keys):
            of_group.append(mixed(row, group) | 1)
        if rung is not None and position >= rung.point - WEIGHED:
            for frame in range(position // FRAME + 1):
                weights[frame] = weights.get(frame, 0) + weight(row, keys[rules.index(Whole())], frame)
        if rung is not None and position + 1 == rung.point:
            droppable = range(setting.policy.sinks // FRAME, (rung.point - WEIGHED) // FRAME)
            present = [frame for frame in droppable if keys[rules.index(Whole())][frame * FRAME]]
            for frame in sorted(present, key=lambda f: weights[f])[: rung.drop]:
                for group, rule in enumerate(rules):
                    if rule == Whole():
                        keys[group][frame * FRAME : (frame + 1) * FRAME] = [0] * FRAME
            passed, weights = passed + 1, {}
        if position + 1 == len(tokens):
            tokens.append(sample(row, seed))
            output = tokens[len(prompt) :]
            if output[-1] == END or len(output) == max_tokens or (ladder and not ladder.fits(len(tokens))):
                return output


class World:
    """A scheduler under load. Everything random comes from one seed."""

    def __init__(self, seed: int, setting: Setting) -> None:
        self.rng = rng = random.Random(seed)
        self.setting = setting
        scale = len(setting.rules) * (1 if setting.budgets is None else 3)
        self.n_frames = rng.choice((6, 8, 13, 20, 40)) * scale
        smallest = rng.choice((8, 8, 8, 16, 64))
        config = BlockManagerConfig(
            min_block_size=smallest,
            max_block_size=rng.choice([size for size in (8, 16, 32, 64) if size >= smallest]),
            enable_prefix_sharing=rng.random() < 0.85,
        )
        limits = Limits(rng.randint(1, 7), rng.randint(8, 48), rng.random() < 0.8)
        self.bounds = limits.chunked_prefill and rng.random() < 0.5  # steps in which somebody decodes, now to this and now to that
        self.limits = limits
        kv = KVManager(setting.groups, self.n_frames, config, setting.policy)
        self.transit = Transit(kv, limits.chunk)
        self.scheduler = Scheduler(kv, limits, self.transit.give_way)
        self.memory = [[0] * FRAME for _ in range(self.n_frames)]
        self.abroad = Abroad(rng, self.transit, self.memory)
        self.to_arrive = rng.randint(5, 25)
        crowded = rng.random() < 0.5  # one long shared prompt, and high priorities that push the low ones out
        self.priorities = (0, 2, 2) if crowded else (0, 1, 1, 2)
        longest = self.n_frames * 4 // len(setting.rules)
        self.templates = [[rng.randint(1, 3) for _ in range(rng.randint(1, longest))] for _ in range(1 if crowded else 3)]
        self.ended: dict[tuple[str, int], Sequence] = {}
        self.aborted: dict[tuple[str, int], Sequence] = {}
        self.accepted: dict[tuple[str, int], Sequence] = {}
        self.expected: dict[tuple[str, int], list[int]] = {}  # the output of each, run alone
        self.drafts = rng.choice((0.0, 0.4, 1.0))
        self.traffic = rng.choice((0.0, 0.1, 0.3))  # how often something begins to come from abroad, or to be read there
        self.drafted = self.right = 0
        self.computed = 0
        self.time = 0.0

    def prompt(self) -> tuple[list[int], str]:
        """And its salt."""
        rng = self.rng
        more = [rng.randint(1, 3) for _ in range(rng.randint(0, 40 if len(self.templates) == 1 else 12))]
        return rng.choice(self.templates) + more, rng.choice(("", "", "", "x"))

    def arrive(self, prompt: list[int], salt: str) -> None:
        rng = self.rng
        max_tokens = rng.randint(1, 40)
        name, priority = f"r{len(self.accepted)}", rng.choice(self.priorities)
        seed, reuse = rng.randrange(4), rng.random() < 0.9
        budgets = self.setting.budgets
        budget = None if budgets is None or rng.random() < 0.2 else rng.randint(*budgets) * len(self.setting.rules)
        for choice in range(rng.choice((1, 1, 1, 2, 4))):
            while True:
                params = SamplingParams(max_tokens=max_tokens)
                one = Sequence(name, choice, list(prompt), params, seed + choice, priority, self.time, salt, reuse, budget)
                try:
                    self.scheduler.add(one)
                    break
                except KVBudgetTooSmall:
                    assert len(prompt) > 1 or max_tokens > 1, "even a single token is refused"
                    prompt, max_tokens = prompt[: -(-len(prompt) // 2)], -(-max_tokens // 2)
            self.accepted[one.id] = one
            self.expected[one.id] = alone(self.setting, prompt, one.seed, max_tokens, one.kv_budget)

    def draft(self) -> None:
        """Guess how some sequences go on: rightly as far as it goes, and mostly wrongly from some place on."""
        for one in self.scheduler.decoding():
            if self.rng.random() < self.drafts:
                guess = self.expected[one.id][one.n_output : one.n_output + self.scheduler.lend(one, self.rng.randint(1, DRAFT))]
                if guess and self.rng.random() < 0.7:
                    guess[self.rng.randrange(len(guess))] = self.rng.randint(0, 3)
                one.draft = tuple(guess)

    def exchange(self) -> None:
        """With other engines; a prompt of which nothing more comes is answered here."""
        if self.to_arrive and self.rng.random() < self.traffic:
            prompt, salt = self.prompt()
            if self.scheduler.kv.fresh(MISS, len(prompt) + 1, self.limits.chunk) <= self.n_frames:
                self.abroad.reserve(prompt, salt, compute(self.setting.rules, prompt), self.scheduler.spare)
        if self.rng.random() < self.traffic and (running := [one for one in self.scheduler._running if one.sparsified_from is None]):
            one = self.rng.choice(running)
            self.abroad.lease(one, compute(self.setting.rules, one.token_ids))
        for brought in self.abroad.go_on():
            self.arrive(brought.prompt, brought.salt)

    def abort(self) -> None:
        name, choice = self.rng.choice(list(self.accepted))
        for one in self.scheduler.abort(name, self.rng.choice((None, choice))):
            self.end(one, self.aborted)

    def end(self, one: Sequence, how: dict[tuple[str, int], Sequence]) -> None:
        assert one.id not in self.ended, f"{one.id} finished twice"
        assert one.id not in self.aborted, f"{one.id} ended twice"
        how[one.id] = one

    def read(self, frames: list[int], n_tokens: int) -> list[int]:
        """The keys of the first positions; 0 where there is no frame."""
        return [k for frame in frames[: -(-n_tokens // FRAME)] for k in (self.memory[frame] if frame >= 0 else [0] * FRAME)][:n_tokens]

    def forward(self, work: Work) -> tuple[list[int], np.ndarray | None]:
        """Compute positions through the page tables; return the last row and those of the draft, and the weights of frames if they are
        wanted."""
        one, start, n_tokens = work.sequence, work.start, work.n_tokens + len(work.draft)
        tokens = [*one.token_ids, *work.draft]
        rules = self.setting.rules
        frames = [listed(table) for table in self.scheduler.kv.tables(one.id)]
        keys = [self.read(of_group, start) for of_group in frames]
        weights = np.zeros(-(-(start + n_tokens) // FRAME), np.int64) if work.weighs else None
        computed = []
        for position in range(start, start + n_tokens):
            row = attend(rules, keys, position, tokens[position], work.sparse)
            computed.append(row)
            for group, of_group in enumerate(keys):
                of_group.append(mixed(row, group) | 1)
                frame = frames[group][position // FRAME]
                assert frame >= 0, f"{one.id} has no frame for what it computes"
                self.memory[frame][position % FRAME] = of_group[-1]
            if weights is not None:
                for frame in range(position // FRAME + 1):
                    weights[frame] += weight(row, keys[rules.index(Whole())], frame)
        return computed[work.n_tokens - 1 :], weights

    def verify(self, work: Work, rows: list[int]) -> list[int]:
        """The tokens of a step, as far as the draft is right and nothing ends."""
        tokens: list[int] = []
        for row, drafted in zip(rows, (*work.draft, None), strict=True):
            tokens.append(sample(row, work.sequence.seed))
            if tokens[-1] == END or tokens[-1] != drafted:
                break
        self.drafted += len(work.draft)
        self.right += len(tokens) - 1
        return tokens

    def check_step(self, step: Step, before: list[Sequence]) -> None:
        """before: those that decoded when it was planned."""
        ids = [work.sequence.id for work in step]
        assert len(set(ids)) == len(ids) <= self.limits.max_batch_size
        prompt_tokens = [work.n_tokens for work in step if work.n_tokens > 1]
        assert sum(prompt_tokens) <= self.limits.chunk_size or (not self.limits.chunked_prefill and len(prompt_tokens) == 1)
        kv = self.scheduler.kv
        assert sum(len(work.draft) for work in step) <= max(0, self.limits.chunk_size - sum(prompt_tokens))
        for one, start, n_tokens, samples, _, weighs, draft in step:
            assert kv.covered(one.id) >= start + n_tokens + len(draft)
            assert not (weighs and draft), "rows that may be wrong are weighed"
            assert samples == (start + n_tokens == one.target)
            if one.ladder is not None:
                held = sum(table.present for table in kv.tables(one.id))
                assert held <= one.ladder.budget + Footprint.of(kv.groups).transient(max(self.limits.chunk, 1 + DRAFT)), (
                    f"{one.id} exceeds its budget"
                )
        streams = [work for work in step if work.sequence in before]
        if streams and self.bounds:
            rows = len(streams) + sum(len(work.sequence.draft) for work in streams)
            prompts = sum(work.n_tokens for work in step if work.sequence not in before)
            assert prompts <= max(self.limits.max_rows - rows, FRAME, len(streams) // 4), "a step is longer than it need be"
        decoding = {one.id for one in self.scheduler._running if one.target - one.computed == 1}
        assert decoding <= set(ids), "a running sequence did not decode"
        assert next(iter(self.scheduler._running)).id in ids, "the first in order made no progress"

    def step(self) -> None:
        self.time += 1.0
        if self.to_arrive and self.rng.random() < 0.3:
            self.to_arrive -= 1
            self.arrive(*self.prompt())
        self.exchange()
        if self.accepted and self.rng.random() < 0.02:
            self.abort()
        self.draft()
        if self.bounds:
            self.limits = self.scheduler.limits = replace(self.limits, max_rows=self.rng.randint(1, 40))
        before = self.scheduler.decoding()
        step = self.scheduler.schedule(self.time)
        self.scheduler.check_integrity(len(self.transit))
        if step is None:
            assert self.transit or self.scheduler.kv.n_held == 0, "frames are held while nothing runs"
            return
        self.check_step(step, before)
        in_any_order = self.rng.sample(step, len(step))  # nobody may read what another writes in the same step
        rows = {work.sequence: self.forward(work) for work in in_any_order}
        self.computed += sum(work.n_tokens for work in step)
        sampled = {work.sequence: self.verify(work, rows[work.sequence][0]) for work in step if work.samples}
        self.scheduler.commit(step, sampled, {one: weights for one, (_, weights) in rows.items() if weights is not None})
        for one in sampled:
            if one.token_ids[-1] == END or one.n_output == one.params.max_tokens or one.over_budget:
                self.scheduler.finish(one)
                self.end(one, self.ended)

    def run(self) -> None:
        patience = 200 + self.to_arrive * 4 * 80 * 3 * (1 if self.setting.budgets is None else 4)
        while self.to_arrive or self.scheduler.has_work or self.transit:
            self.step()
            patience -= 1
            assert patience, "livelock"
        self.scheduler.check_integrity()
        kv = self.scheduler.kv
        assert (kv.n_held, kv.n_holders) == (0, 0)
        assert kv.n_free + kv.n_cached == self.n_frames
        assert self.ended.keys() | self.aborted.keys() == self.accepted.keys()
        for one in self.accepted.values():
            output, expected = one.token_ids[one.prompt_len :], self.expected[one.id]
            assert output == expected[: len(output)], f"{one.id} differs from its run alone"
            assert one.id in self.aborted or len(output) == len(expected), f"{one.id} stopped early"


def listed(table: PageTable) -> list[int]:
    """The frame of each index, as a kernel reads it: from the arrays alone."""
    ends = [*table.starts[1:], table.n_frames]
    extents = zip(table.first, table.starts, ends, strict=True)
    return [first + i if first >= 0 else -1 for first, start, end in extents for i in range(end - start)]
