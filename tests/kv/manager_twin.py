"""A twin of the KV manager with several groups: a dict of prefixes per group, and everything else recounted from the sequences."""

from __future__ import annotations

import random

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.types import FRAME, Streaming
from tokenmill.kv.budget import WEIGHED, Rung, SparsePolicy
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
    """The manager beside a model of it. `time` counts operations, `done` what has happened in them."""

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
        self.done = {"hit": 0, "split": 0, "evict": 0, "sparsify": 0, "hole": 0}

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
        """Reserve, compute (or have it brought) and commit; at a point, give up frames."""
        one = self.running[seq_id]
        if len(one.tokens) - one.computed <= 0:
            one.tokens += [self.rng.randint(1, 2) for _ in range(self.rng.randint(1, 9))]
        step = min(len(one.tokens), one.computed + self.rng.randint(1, 60))
        whole = step // FRAME * FRAME
        brought = self.rng.random() < 0.3 and not one.sparse and whole > one.computed
        step = whole if brought else step
        evicted = self.kv.n_evictions
        goal = step if brought else len(one.tokens)
        if brought:  # what slides out of sight goes before there is a need for more
            before, one.computed = self.live(), step
            self.note_use(before)
        available, missing = self.kv.available, self.kv.missing(seq_id, goal, step)
        enough = self.kv.place(seq_id, step) if brought else self.kv.reserve(seq_id, goal, step, keep=self.rng.randint(0, 20))
        assert enough == (missing <= available) or brought
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
                    if own[group][frame] >= 0:
                        self.cache[group].setdefault(key, own[group][frame])
                        self.used[group][key] = self.time
                    else:
                        assert brought, "what was computed had no frame"
                        self.done["hole"] += 1
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
        store = self.kv._store
        for salt, _, node in store._cache._tree.nodes():
            key = paths.get(id(node.parent))
            run = tuple(memoryview(bytes(node.key)).cast("i"))
            for at, number in enumerate(node.frames):
                key = self.key(salt, (key.tokens if key else ()) + run[at * FRAME : (at + 1) * FRAME], key)
                there.add(key)
                for rule, companions in zip(store.followers, store._cache._companions, strict=True):
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
