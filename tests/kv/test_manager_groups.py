"""The KV manager with several groups: 100,000 random operations against a twin that recounts everything, and single cases."""

from __future__ import annotations

import random

import pytest

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.messages import PageCounts
from tokenmill.core.types import FRAME, Streaming
from tokenmill.kv.budget import WEIGHED, Rung, SparsePolicy
from tokenmill.kv.footprint import frames_for
from tokenmill.kv.groups import KVGroup, Retention, Whole, Window
from tokenmill.kv.manager import KVManager
from tokenmill.kv.prefix_tree import PrefixHit

HEADS, POSITIONS = SparsePolicy("topk_heads", sinks=16), SparsePolicy("topk_positions", sinks=8)
MODELS: list[tuple[list[Retention], SparsePolicy | None]] = [
    ([Whole(), Window(20), Window(20)], None),
    ([Window(9), Whole(), Whole()], None),
    ([Window(24), Window(24)], None),
    ([Whole(), Whole()], POSITIONS),
    ([Whole(), Streaming(16, 24), Window(16)], HEADS),
]


def manager(rules: list[Retention], n_frames: int, policy: SparsePolicy | None = None, **config: object) -> KVManager:
    groups = [KVGroup(f"group {number}", rule, ((number, 0),)) for number, rule in enumerate(rules)]
    return KVManager(groups, n_frames, BlockManagerConfig(**config), policy)  # type: ignore[arg-type]


class Key:
    """A salt and tokens that end with a frame; there is one object for each."""

    def __init__(self, salt: str, tokens: tuple[int, ...], parent: Key | None) -> None:
        self.salt = salt
        self.tokens = tokens
        self.parent = parent


class Running:
    """What the twin knows of a sequence."""

    def __init__(self, tokens: list[int], salt: str, shared: int) -> None:
        self.tokens = tokens
        self.salt = salt
        self.shared = shared
        self.computed = shared * FRAME
        self.sparse = False
        self.streams = False
        self.dropped: set[int] = set()
        self.keys: list[Key] = []

    def holds(self, rule: Retention, frame: int) -> bool:
        """Whether a frame of computed positions is held."""
        end = FRAME * (frame + 1)
        if isinstance(rule, Window):
            return end > self.computed + 1 - rule.tokens
        if isinstance(rule, Streaming):
            return not self.streams or end <= rule.sinks or end > self.computed + 1 - rule.recent
        return frame not in self.dropped


class Twin:
    """The manager beside a model of it. `time` counts operations."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.rules, self.policy = MODELS[seed % len(MODELS)]
        self.shares = rng.random() < 0.9
        smallest = rng.choice((8, 8, 16, 64))
        self.kv = manager(
            self.rules,
            rng.choice((20, 40, 80)) * len(self.rules),
            self.policy,
            min_block_size=smallest,
            max_block_size=rng.choice([size for size in (8, 16, 32, 64) if size >= smallest]),
            enable_prefix_sharing=self.shares,
        )
        self.lead = None if self.policy or Whole() not in self.rules else self.rules.index(Whole())
        self.cache: list[dict[Key, int]] = [{} for _ in self.rules]  # per group, the frame of a prefix's last 8 tokens
        self.keys: dict[Key, int] = {}  # every prefix that the tree has, and when it was last in use
        self.used: list[dict[Key, int]] = [{} for _ in self.rules]  # when somebody last held that frame
        self.running: dict[int, Running] = {}
        self.names: dict[tuple[str, tuple[int, ...]], Key] = {}
        self.texts = [[rng.randint(1, 2) for _ in range(200)] for _ in range(3)]
        self.time = 0
        self.done = {"hit": 0, "split": 0, "evict": 0, "sparsify": 0}

    def prefix(self, one: Running, frame: int) -> Key:
        while len(one.keys) <= frame:
            tokens = tuple(one.tokens[: FRAME * (len(one.keys) + 1)])
            one.keys.append(self.key(one.salt, tokens, one.keys[-1] if one.keys else None))
        return one.keys[frame]

    def key(self, salt: str, tokens: tuple[int, ...], parent: Key | None) -> Key:
        return self.names.setdefault((salt, tokens), Key(salt, tokens, parent))

    def live(self) -> tuple[set[Key], list[dict[Key, int]]]:
        """The keys in use, and per group how many sequences hold each frame."""
        keys: set[Key] = set()
        held: list[dict[Key, int]] = [{} for _ in self.rules]
        for one in self.running.values():
            for frame in range(one.shared):
                key = self.prefix(one, frame)
                keys.add(key)
                for group, rule in enumerate(self.rules):
                    if one.holds(rule, frame):
                        held[group][key] = held[group].get(key, 0) + 1
        return keys, held

    def hit(self, tokens: list[int], salt: str, limit: int | None) -> PrefixHit:
        most = min(len(tokens) - 1, len(tokens) if limit is None else limit) // FRAME
        asked = Running(tokens, salt, 0)
        keys = [self.prefix(asked, frame) for frame in range(most)]
        there = next((at for at, key in enumerate(keys) if key not in self.keys), most)
        live, held = self.live()
        for end in range(there if self.shares else 0, -1, -1):
            asker = Running(tokens, salt, end)
            wanted = [(group, keys[f]) for group, rule in enumerate(self.rules) for f in range(end) if asker.holds(rule, f)]
            if all(key in self.cache[group] for group, key in wanted):
                idle = sum(key not in (live if group == self.lead else held[group]) for group, key in wanted)
                return PrefixHit(end, idle, len(wanted))
        raise AssertionError("the empty prefix is always found")

    def act(self) -> None:
        self.time += 1
        kind = self.rng.random()
        if kind < 0.2 and len(self.running) < 6:
            self.acquire()
        elif not self.running:
            return
        elif kind < 0.85:
            self.advance(self.rng.choice(sorted(self.running)))
        elif kind < 0.9:
            seq_id = self.rng.choice(sorted(self.running))
            self.kv.truncate(seq_id, self.running[seq_id].computed + self.rng.randint(0, 10))
        else:
            self.release(self.rng.choice(sorted(self.running)))

    def acquire(self) -> None:
        text = self.rng.choice(self.texts)
        cut = self.rng.randint(1, len(text) - 1)
        tokens = text[:cut] + [self.rng.randint(1, 2) for _ in range(self.rng.randint(0, 40))]
        salt, limit = self.rng.choice(("", "", "x")), self.rng.choice((None, None, 0, 40))
        expected = self.hit(tokens, salt, limit)
        assert self.kv.match(tokens, salt, limit) == expected
        if expected.idle > self.kv.available:  # promised to others; the plan would not admit it
            limit, expected = 0, PrefixHit(0, 0, 0)
        assert self.kv.acquire(self.time, tokens, salt, limit) == expected.frames * FRAME
        self.running[self.time] = one = Running(tokens, salt, expected.frames)
        self.done["hit"] += expected.frames > 0
        self.agree_on_frames(self.time, one)
        chunk, goal = self.rng.randint(8, 60), len(tokens) + 1
        if self.kv.fresh(PrefixHit(one.shared, 0, expected.held), goal, chunk) <= self.kv.available:
            self.kv.promise(self.time, goal, chunk)

    def advance(self, seq_id: int) -> None:
        """Reserve, compute and commit; at a point, give up frames."""
        one = self.running[seq_id]
        if len(one.tokens) - one.computed <= 0:
            one.tokens += [self.rng.randint(1, 2) for _ in range(self.rng.randint(1, 9))]
        step = min(len(one.tokens), one.computed + self.rng.randint(1, 60))
        evicted = self.kv.n_evictions
        available, missing = self.kv.available, self.kv.missing(seq_id, len(one.tokens), step)
        enough = self.kv.reserve(seq_id, len(one.tokens), step, keep=self.rng.randint(0, 20))
        assert enough == (missing <= available)
        if self.kv.n_evictions > evicted:
            self.see_what_was_evicted()
        if not enough:
            self.release(seq_id)
            return
        own = [table.frames(0, step // FRAME) for table in self.kv.tables(seq_id)]
        self.kv.commit(seq_id, one.tokens, step)
        before, one.computed = self.live(), step
        if self.shares and not one.sparse:
            for frame in range(one.shared, step // FRAME):
                key = self.prefix(one, frame)
                self.done["split"] += any(other.parent is key.parent and other is not key for other in self.keys)
                self.keys[key] = self.time
                for group in range(len(self.rules)):
                    self.cache[group].setdefault(key, own[group][frame])
                    self.used[group][key] = self.time
            one.shared = step // FRAME
        self.note_use(before)
        if self.policy and self.rng.random() < 0.5 and one.computed % FRAME == 0:
            self.sparsify(seq_id, one)
        self.agree_on_frames(seq_id, one)

    def sparsify(self, seq_id: int, one: Running) -> None:
        before = self.live()
        heads = self.policy is HEADS and not one.streams
        start, stop = self.policy.sinks // FRAME if self.policy else 0, (one.computed - WEIGHED) // FRAME
        candidates = [frame for frame in range(start, stop) if frame not in one.dropped]
        if heads:
            self.kv.sparsify(seq_id, Rung(one.computed, 0))
            one.streams = True
        elif candidates:
            weights = [self.rng.randint(0, 3) for _ in range(one.computed // FRAME)]
            count = self.rng.randint(1, len(candidates))
            self.kv.sparsify(seq_id, Rung(one.computed, count), weights)
            one.dropped |= set(sorted(candidates, key=lambda frame: weights[frame])[:count])
        else:
            return
        one.sparse = True
        self.note_use(before)
        self.done["sparsify"] += 1

    def release(self, seq_id: int) -> None:
        before, available, promised = self.live(), self.kv.available, self.kv.releasable(seq_id)
        self.kv.release(seq_id)
        assert self.kv.available == available + promised
        del self.running[seq_id]
        self.note_use(before)

    def note_use(self, before: tuple[set[Key], list[dict[Key, int]]]) -> None:
        keys, held = self.live()
        for key in before[0] - keys:
            self.keys[key] = self.time
        for group, of_group in enumerate(held):
            for key in before[1][group].keys() - of_group.keys():
                self.used[group][key] = self.time

    def see_what_was_evicted(self) -> None:
        """It was idle, nothing builds on it, and nothing that was idle for longer is still there."""
        there: set[Key] = set()
        followers: list[set[Key]] = [set() for _ in self.rules]
        paths: dict[int, Key] = {}
        for salt, _, node in self.kv._cache._tree.nodes():
            key = paths.get(id(node.parent))
            run = tuple(memoryview(bytes(node.key)).cast("i"))
            for at, number in enumerate(node.frames):
                key = self.key(salt, (key.tokens if key else ()) + run[at * FRAME : (at + 1) * FRAME], key)
                there.add(key)
                for rule, companions in zip(self.kv._followers, self.kv._cache._companions, strict=True):
                    for group in rule.groups:
                        if number in companions:
                            followers[group].add(key)
                if self.lead is not None:
                    followers[self.lead].add(key)
            if key:
                paths[id(node)] = key
        live, held = self.live()
        gone_keys = self.keys.keys() - there
        assert not gone_keys & live
        assert there == self.keys.keys() - gone_keys, "the tree has what was never put there"
        assert all(key.parent in there for key in there if key.parent)
        ages: list[int] = [self.keys[key] for key in gone_keys]
        for group in range(len(self.rules)):
            gone = self.cache[group].keys() - followers[group]
            assert not gone & held[group].keys(), "a frame that is held was evicted"
            if group != self.lead:
                ages += [self.used[group][key] for key in gone - gone_keys]
            for key in gone:
                del self.cache[group][key], self.used[group][key]
        for key in gone_keys:
            del self.keys[key]
        if ages:
            self.done["evict"] += 1
            idle = [self.used[g][k] for g in range(len(self.rules)) if g != self.lead for k in self.cache[g].keys() - held[g].keys()]
            inner = {key.parent for key in there}
            idle += [self.keys[key] for key in there - live - inner]
            assert not idle or max(ages) <= min(idle), "something older was passed over"

    def agree_on_frames(self, seq_id: int, one: Running) -> None:
        for group, (table, rule) in enumerate(zip(self.kv.tables(seq_id), self.rules, strict=True)):
            frames = table.frames(0, one.shared)
            expected = [self.cache[group][self.prefix(one, f)] if one.holds(rule, f) else -1 for f in range(one.shared)]
            assert frames == expected, f"group {group}"
            later = table.frames(one.shared, one.computed // FRAME)
            assert [frame >= 0 for frame in later] == [one.holds(rule, f) for f in range(one.shared, one.computed // FRAME)]

    def agree_on_counts(self) -> None:
        live, held = self.live()
        cached = sum(len(self.cache[g].keys() - (live if g == self.lead else held[g].keys())) for g in range(len(self.rules)))
        private = 0
        for seq_id, one in self.running.items():
            for table, rule in zip(self.kv.tables(seq_id), self.rules, strict=True):
                full = one.computed // FRAME
                private += sum(one.holds(rule, f) for f in range(one.shared, full)) + table.n_frames - max(full, one.shared)
        counts = self.kv.counts()
        assert counts.cached == cached
        assert counts.held == private + sum(map(len, self.cache)) - cached
        assert counts.shared == sum(n > 1 for of_group in held for n in of_group.values())
        use = self.kv.use()
        assert use.references == counts.held + sum(n - 1 for of_group in held for n in of_group.values() if n)


@pytest.mark.parametrize("seed", range(25))
def test_random_operations_agree_with_a_twin_that_recounts(seed: int) -> None:
    twin = Twin(seed)
    for number in range(4000):
        try:
            twin.act()
            if number % 8 == 0:
                twin.agree_on_counts()
                twin.kv.check_integrity()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, operation {number}: {error}") from error
    for seq_id in list(twin.running):
        twin.release(seq_id)
    twin.kv.check_integrity()
    assert twin.kv.n_held == 0
    if twin.shares:
        assert min(v for k, v in twin.done.items() if k != "sparsify") > 50, twin.done
    assert twin.done["sparsify"] > 10 or not twin.policy


def run(kv: KVManager, seq_id: str, tokens: list[int], chunk: int = 1000) -> int:
    found = kv.acquire(seq_id, tokens, "")
    for end in range(found + chunk, len(tokens) + chunk, chunk):
        assert kv.reserve(seq_id, len(tokens), min(end, len(tokens)))
        kv.commit(seq_id, tokens, min(end, len(tokens)))
        kv.check_integrity()
    return found


def test_a_window_holds_what_is_in_sight_and_no_more() -> None:
    kv = manager([Whole(), Window(32)], 400)
    run(kv, "a", list(range(1000)), chunk=16)
    whole, window = kv.tables("a")
    assert (whole.present, window.present) == (126, frames_for(1000) - (1001 - 32) // FRAME), "whole pages have two frames by then"
    assert (window.first[0], window.starts[0], window.starts[1]) == (-1, 0, (1001 - 32) // FRAME)
    assert kv.n_cached == 125 - window.present, "what slid away can still be found"


def test_a_prompt_of_any_length_takes_the_frames_of_a_window_and_a_chunk() -> None:
    kv = manager([Window(32)] * 3, 3 * ((32 + 16 + 13) // FRAME))
    kv.acquire("a", tokens := list(range(5000)), "")
    kv.promise("a", 5001, 16)
    assert kv.available == 0
    for end in range(16, 5000, 16):
        assert kv.missing("a", 5001, end) == 0
        assert kv.reserve("a", 5001, end)
        kv.commit("a", tokens, end)
        assert kv.available == 0
    kv.check_integrity()


def test_a_hit_ends_where_a_window_has_gone() -> None:
    kv = manager([Whole(), Window(32)], 300)
    tokens = list(range(800))
    run(kv, "a", tokens)
    kv.release("a")
    assert kv.match(tokens, "").frames == 99
    kv.acquire("b", [7], "")
    assert kv.reserve("b", (kv.n_free // 2) * FRAME), "first what is free"
    assert kv.n_evictions == 0
    assert kv.reserve("b", kv.covered("b") + 20 * FRAME)
    assert kv.n_evictions > 0
    hit = kv.match(tokens, "")
    assert hit.frames == 99, "frames that slid away long before the rest became idle go first"
    assert kv.match(tokens[:200], "").frames < 24


def test_evicting_a_key_takes_its_companions_along() -> None:
    kv = manager([Whole(), Window(64)], 32)
    run(kv, "a", list(range(64)))
    kv.release("a")
    kv.acquire("b", [7], "")
    assert kv.reserve("b", 8 * 9)
    assert kv.n_evictions == 2, "a whole frame and the window's of the same positions"
    assert kv.match([*range(64), 1], "").frames == 7


def test_dropped_frames_come_back_although_their_prefix_is_in_use() -> None:
    kv = manager([Whole(), Streaming(16, 32)], 100, HEADS)
    run(kv, "a", list(range(320)))
    before = kv.available
    kv.sparsify("a", Rung(320, 0))
    freed = 320 // FRAME - 2 - 4
    assert kv.available == before + freed
    assert (kv.dropped("a"), kv.use().dropped) == (freed * FRAME, freed)
    assert [kv.tables("a")[1].first[1], list(kv.tables("a")[1].starts)] == [-1, [0, 2, 36]]
    kv.check_integrity()


def test_what_a_sparse_sequence_computes_is_its_own() -> None:
    kv = manager([Whole(), Whole()], 200, POSITIONS)
    tokens = list(range(320))
    run(kv, "a", tokens[:160])
    kv.sparsify("a", Rung(160, 4), [0] * 20)
    assert kv.tables("a")[0].held(0, 20) == [(0, 1), (5, 20)], "of equal weights the earlier frames go"
    assert kv.reserve("a", 320)
    kv.commit("a", tokens, 320)
    kv.check_integrity()
    assert kv.match([*tokens, 1], "").frames == 20
    kv.release("a")
    assert kv.n_cached == 2 * 20


def test_statistics_tell_pages_shared_frames_and_unfilled_positions() -> None:
    kv = manager([Whole(), Window(64)], 100)
    tokens = list(range(70))
    run(kv, "a", tokens)
    run(kv, "b", tokens)
    assert kv.counts().shared == 8 + 8
    assert kv.use().unfilled == 2 * 2 * (72 - 70)
    assert kv.use().references == 2 * 2 * 9
    # 100 frames are 12 pages of 64 tokens, and one of 32 that is cut up; each group has a large one that both hold, and one of 8 for each.
    none = PageCounts(0, 0, 0, 0)
    assert kv.use().pages == {8: PageCounts(0, 4, 0, 0), 16: none, 32: none, 64: PageCounts(10, 2, 0, 2)}


def test_a_companion_with_a_wrong_count_fails_the_integrity_check() -> None:
    kv = manager([Whole(), Window(64)], 100)
    run(kv, "a", list(range(70)))
    kv._cache._companions[0].ref([kv.tables("a")[0].first[0]])
    with pytest.raises(AssertionError, match="wrong reference count"):
        kv.check_integrity()


def test_a_hole_in_sight_fails_the_integrity_check() -> None:
    kv = manager([Whole(), Window(64), Window(64)], 100)
    run(kv, "a", list(range(70)))
    kv.tables("a")[2].punch(6, 7)
    with pytest.raises(AssertionError):
        kv.check_integrity()
