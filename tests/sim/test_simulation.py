"""Scheduler and KV manager under random load in tiny pools, with a toy model in place of the real one.

The toy model's key at a position depends on the keys of *all* positions before it, which it reads through the page
table from a toy memory of frames. So any frame that is shared, evicted, reused or written wrongly changes tokens,
and each sequence is compared with the same model run alone over a plain list.
"""

import random
from collections.abc import Callable

import pytest

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.types import FRAME, SamplingParams
from tokenmill.kv import manager, prefix_tree
from tokenmill.kv.buddy import BuddyAllocator
from tokenmill.kv.groups import KVGroup, Whole
from tokenmill.kv.manager import KVManager
from tokenmill.kv.prefix_tree import Node, PrefixTree
from tokenmill.kv.table import PageTable
from tokenmill.scheduler.plan import Limits
from tokenmill.scheduler.scheduler import Scheduler, Step
from tokenmill.scheduler.sequence import Sequence

MASK = (1 << 61) - 1
END = 0  # the token that ends a sequence


def key(sum_before: int, token: int) -> int:
    return (sum_before * 1_000_003 + token * 7_919 + 12_345) & MASK


def sample(last_key: int, seed: int) -> int:
    """A token from a vocabulary of 4, so that answers collide with each other and with prompts; END is rare."""
    drawn = (last_key ^ seed * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & MASK
    return END if drawn >> 40 & 31 == 0 else 1 + (drawn >> 20) % 3


def alone(prompt: list[int], seed: int, max_tokens: int) -> list[int]:
    """The tokens of one sequence, computed one at a time without frames."""
    total, last, output = 0, 0, list[int]()
    for token in prompt:
        last = key(total, token)
        total += last
    while True:
        output.append(sample(last, seed))
        if output[-1] == END or len(output) == max_tokens:
            return output
        last = key(total, output[-1])
        total += last


class World:
    """A scheduler under load. Everything random comes from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.n_frames = rng.choice((6, 8, 13, 20, 40))
        smallest = rng.choice((8, 8, 8, 16, 64))
        config = BlockManagerConfig(
            min_block_size=smallest,
            max_block_size=rng.choice([size for size in (8, 16, 32, 64) if size >= smallest]),
            enable_prefix_sharing=rng.random() < 0.85,
        )
        limits = Limits(rng.randint(1, 7), rng.randint(8, 48), rng.random() < 0.8)
        self.limits = limits
        self.scheduler = Scheduler(KVManager([KVGroup("whole", Whole(), (0,))], self.n_frames, config), limits)
        self.memory = [[0] * FRAME for _ in range(self.n_frames)]
        self.to_arrive = rng.randint(5, 25)
        crowded = rng.random() < 0.5  # one long shared prompt, and high priorities that push the low ones out
        self.priorities = (0, 2, 2) if crowded else (0, 1, 1, 2)
        self.templates = [[rng.randint(1, 3) for _ in range(rng.randint(1, self.n_frames * 4))] for _ in range(1 if crowded else 3)]
        self.ended: dict[tuple[str, int], Sequence] = {}
        self.aborted: dict[tuple[str, int], Sequence] = {}
        self.accepted: dict[tuple[str, int], Sequence] = {}
        self.computed = 0
        self.time = 0.0

    def arrive(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.templates) + [rng.randint(1, 3) for _ in range(rng.randint(0, 40 if len(self.templates) == 1 else 12))]
        max_tokens = rng.randint(1, 40)
        while -(-(len(prompt) + max_tokens) // FRAME) > self.n_frames:
            prompt, max_tokens = prompt[: -(-len(prompt) // 2)], -(-max_tokens // 2)
        params = SamplingParams(max_tokens=max_tokens)
        name, priority, salt = f"r{len(self.accepted)}", rng.choice(self.priorities), rng.choice(("", "", "", "x"))
        seed, reuse = rng.randrange(4), rng.random() < 0.9
        for choice in range(rng.choice((1, 1, 1, 2, 4))):
            one = Sequence(name, choice, list(prompt), params, seed + choice, priority, self.time, salt, reuse)
            self.scheduler.add(one)
            self.accepted[one.id] = one

    def abort(self) -> None:
        name, choice = self.rng.choice(list(self.accepted))
        for one in self.scheduler.abort(name, self.rng.choice((None, choice))):
            self.end(one, self.aborted)

    def end(self, one: Sequence, how: dict[tuple[str, int], Sequence]) -> None:
        assert one.id not in self.ended, f"{one.id} finished twice"
        assert one.id not in self.aborted, f"{one.id} ended twice"
        how[one.id] = one

    def forward(self, one: Sequence, start: int, n_tokens: int) -> int:
        """Compute positions through the page table; return the last key."""
        table = self.scheduler.kv.table(one.id)
        ends = [*table.starts[1:], table.n_frames]
        frames = [table.first[i] + j for i in range(len(ends)) for j in range(ends[i] - table.starts[i])]
        keys = [k for frame in frames for k in self.memory[frame]]
        total, last = sum(keys[:start]), 0
        for position in range(start, start + n_tokens):
            last = key(total, one.token_ids[position])
            total += last
            self.memory[frames[position // FRAME]][position % FRAME] = last
        return last

    def check_step(self, step: Step) -> None:
        ids = [work.sequence.id for work in step]
        assert len(set(ids)) == len(ids) <= self.limits.max_batch_size
        prompt_tokens = [work.n_tokens for work in step if work.n_tokens > 1]
        assert sum(prompt_tokens) <= self.limits.chunk_size or (not self.limits.chunked_prefill and len(prompt_tokens) == 1)
        kv = self.scheduler.kv
        for one, start, n_tokens, samples in step:
            assert kv.covered(one.id) >= start + n_tokens
            assert samples == (start + n_tokens == one.target)
        decoding = {one.id for one in self.scheduler._running if one.target - one.computed == 1}
        assert decoding <= set(ids), "a running sequence did not decode"
        assert next(iter(self.scheduler._running)).id in ids, "the first in order made no progress"

    def step(self) -> None:
        self.time += 1.0
        if self.to_arrive and self.rng.random() < 0.3:
            self.to_arrive -= 1
            self.arrive()
        if self.accepted and self.rng.random() < 0.02:
            self.abort()
        step = self.scheduler.schedule(self.time)
        self.scheduler.check_integrity()
        if step is None:
            assert self.scheduler.kv.n_held == 0, "frames are held while nothing runs"
            return
        self.check_step(step)
        in_any_order = self.rng.sample(step, len(step))  # nobody may read what another writes in the same step
        keys = {work.sequence: self.forward(work.sequence, work.start, work.n_tokens) for work in in_any_order}
        self.computed += sum(work.n_tokens for work in step)
        self.scheduler.commit(step, {work.sequence: sample(keys[work.sequence], work.sequence.seed) for work in step if work.samples})
        for work in step:
            one = work.sequence
            if work.samples and (one.token_ids[-1] == END or one.n_output == one.params.max_tokens):
                self.scheduler.finish(one)
                self.end(one, self.ended)

    def run(self) -> None:
        patience = 200 + self.to_arrive * 4 * 80 * 3
        while self.to_arrive or self.scheduler.has_work:
            self.step()
            patience -= 1
            assert patience, "livelock"
        self.scheduler.check_integrity()
        kv = self.scheduler.kv
        assert (kv.n_held, kv.n_holders) == (0, 0)
        assert kv.n_free + kv.n_cached == self.n_frames
        assert self.ended.keys() | self.aborted.keys() == self.accepted.keys()
        for one in self.accepted.values():
            prompt, output = one.token_ids[: one.prompt_len], one.token_ids[one.prompt_len :]
            assert one.params.max_tokens is not None
            expected = alone(prompt, one.seed, one.params.max_tokens)
            assert output == expected[: len(output)], f"{one.id} differs from its run alone"
            assert one.id in self.aborted or len(output) == len(expected), f"{one.id} stopped early"


@pytest.mark.parametrize("block", range(10))
def test_every_request_ends_once_with_the_tokens_of_its_run_alone(block: int) -> None:
    preemptions = evictions = hits = 0
    for seed in range(block * 40, block * 40 + 40):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        preemptions += world.scheduler.n_preemptions
        evictions += world.scheduler.kv.n_evictions
        hits += world.scheduler.prefix_hits
    assert min(preemptions, evictions, hits) > 100, f"the load is too light to show anything: {preemptions}, {evictions}, {hits}"


def run_worlds(seeds: range) -> None:
    for seed in seeds:
        World(seed).run()


Patch = Callable[[pytest.MonkeyPatch], None]


def reuse_the_last_token_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manager, "_reusable", lambda tokens: tokens[: len(tokens) // FRAME * FRAME])


def share_a_frame_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    commit = KVManager.commit
    patch.setattr(KVManager, "commit", lambda kv, i, tokens, computed: commit(kv, i, tokens, min(len(tokens), computed + 1)))


def keep_the_reference_on_release(patch: pytest.MonkeyPatch) -> None:
    release = PrefixTree.release

    def skipping(tree: PrefixTree, node: Node) -> None:
        if node.refs != 2:
            release(tree, node)

    patch.setattr(PrefixTree, "release", skipping)


def free_a_duplicate_but_go_on_with_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageTable, "replace", lambda table, start, frames: None)


def take_one_differing_frame_for_equal(patch: pytest.MonkeyPatch) -> None:
    common = Node.common

    def generous(node: Node, data: bytes, at: int) -> int:
        return min(len(node.frames), common(node, data, at) + 1, (len(data) - at) // prefix_tree._STEP)

    patch.setattr(Node, "common", generous)


def compare_only_the_first_tokens_of_a_frame(patch: pytest.MonkeyPatch) -> None:
    encode = prefix_tree._encode
    patch.setattr(prefix_tree, "_encode", lambda tokens: encode([0 if i % FRAME == FRAME - 1 else t for i, t in enumerate(tokens)]))


def evict_the_frame_before_the_tail(patch: pytest.MonkeyPatch) -> None:
    evict = PrefixTree.evict
    patch.setattr(PrefixTree, "evict", lambda tree, count: [max(0, frame - 1) for frame in evict(tree, count)])


def forget_that_a_branch_is_in_use_when_splitting(patch: pytest.MonkeyPatch) -> None:
    split = PrefixTree._split

    def forgetting(tree: PrefixTree, node: Node, at: int) -> Node:
        upper = split(tree, node, at)
        upper.uses = 0
        return upper

    patch.setattr(PrefixTree, "_split", forgetting)


def promise_frames_that_others_hold(patch: pytest.MonkeyPatch) -> None:
    would_idle = PrefixTree.would_idle
    patch.setattr(PrefixTree, "would_idle", lambda tree, node: would_idle(tree, node) + 3)


def join_pages_that_are_not_buddies(patch: pytest.MonkeyPatch) -> None:
    give = BuddyAllocator._give
    patch.setattr(BuddyAllocator, "_give", lambda pool, first, order: give(pool, first, min(3, order + 1) if first % 16 == 0 else order))


def go_on_where_it_was_after_preemption(patch: pytest.MonkeyPatch) -> None:
    acquire = KVManager.acquire
    patch.setattr(KVManager, "acquire", lambda kv, i, tokens, salt, reuse: acquire(kv, i, tokens, salt, reuse) + FRAME * (len(tokens) > 40))


def write_the_last_extent_one_frame_early(patch: pytest.MonkeyPatch) -> None:
    append = PageTable.append

    def shifted(table: PageTable, first: int, count: int) -> None:
        append(table, first - 1 if len(table.first) > 2 and first else first, count)

    patch.setattr(PageTable, "append", shifted)


FAULTS: list[Patch] = [
    reuse_the_last_token_too,
    share_a_frame_before_it_is_full,
    keep_the_reference_on_release,
    free_a_duplicate_but_go_on_with_it,
    take_one_differing_frame_for_equal,
    compare_only_the_first_tokens_of_a_frame,
    evict_the_frame_before_the_tail,
    forget_that_a_branch_is_in_use_when_splitting,
    promise_frames_that_others_hold,
    join_pages_that_are_not_buddies,
    go_on_where_it_was_after_preemption,
    write_the_last_extent_one_frame_early,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("checked", [True, False], ids=["with integrity checks", "by tokens alone"])
def test_a_seeded_fault_is_caught(fault: Patch, checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    if not checked:
        monkeypatch.setattr(Scheduler, "check_integrity", lambda scheduler: None)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run_worlds(range(120))
