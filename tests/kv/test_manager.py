"""The KV manager: ownership after every operation, against a naive model."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.types import FRAME
from tokenmill.kv.footprint import frames_for
from tokenmill.kv.groups import KVGroup, Whole
from tokenmill.kv.manager import LADDERS, KVManager

GROUPS = [KVGroup("whole", Whole(), ((0, 0), (1, 0)))]
Key = tuple[str, tuple[int, ...]]


def manager(n_frames: int, **config: object) -> KVManager:
    return KVManager(GROUPS, n_frames, BlockManagerConfig(**config))  # type: ignore[arg-type]


def run(kv: KVManager, seq_id: object, tokens: list[int], salt: str = "", limit: int | None = None) -> int:
    """Admit, compute and commit a whole prompt; return how much of it was reused."""
    computed = kv.acquire(seq_id, tokens, salt, limit)
    assert kv.reserve(seq_id, len(tokens))
    kv.commit(seq_id, tokens, len(tokens))
    kv.check_integrity()
    return computed


frames_of_tokens = st.lists(st.sampled_from([(7,) * 7 + (1,), (7,) * 7 + (2,)]), max_size=6)
tails = st.lists(st.sampled_from([7, 1]), min_size=1, max_size=9)


class NaiveSequence:
    """What the model knows of one sequence."""

    def __init__(self, tokens: list[int], salt: str, shared: int) -> None:
        self.tokens = tokens
        self.salt = salt
        self.shared = shared
        self.computed = shared * FRAME


class Machine(RuleBasedStateMachine):
    """Random operations; the model keeps one dict entry per cached prefix and recounts everything each time."""

    @initialize(n_frames=st.integers(6, 40), pages=st.sampled_from([(8, 8), (8, 64), (16, 32), (64, 64)]), shares=st.booleans())
    def build(self, n_frames: int, pages: tuple[int, int], shares: bool) -> None:
        self.kv = manager(n_frames, min_block_size=pages[0], max_block_size=pages[1], enable_prefix_sharing=shares)
        self.shares = shares
        self.tree: dict[Key, int] = {}
        self.sequences: dict[int, NaiveSequence] = {}
        self.next_id = 0

    def live(self, key: Key) -> bool:
        salt, prefix = key
        same = [s for s in self.sequences.values() if s.salt == salt and s.shared * FRAME >= len(prefix)]
        return any(tuple(s.tokens[: len(prefix)]) == prefix for s in same)

    def keys(self, tokens: list[int], salt: str) -> list[Key]:
        return [(salt, tuple(tokens[:end])) for end in range(FRAME, len(tokens) + 1, FRAME)]

    def expected_hit(self, tokens: list[int], salt: str) -> list[Key]:
        found = []
        for key in self.keys(tokens[: len(tokens) - 1], salt):
            if key not in self.tree:
                break
            found.append(key)
        return found

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.sequences)))

    @rule(body=frames_of_tokens, tail=tails, salt=st.sampled_from(["", "x"]), limit=st.none() | st.integers(0, 50))
    def acquire(self, body: list[tuple[int, ...]], tail: list[int], salt: str, limit: int | None) -> None:
        tokens = [token for frame in body for token in frame] + tail
        found = self.expected_hit(tokens, salt)
        assert self.kv.match(tokens, salt) == (len(found), sum(not self.live(key) for key in found), len(found))
        found = found if limit is None else found[: limit // FRAME]
        assert self.kv.acquire(self.next_id, tokens, salt, limit) == len(found) * FRAME < len(tokens)
        assert self.kv.tables(self.next_id)[0].frames(0, len(found)) == [self.tree[key] for key in found]
        self.sequences[self.next_id] = NaiveSequence(tokens, salt, len(found))
        self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), extra=st.integers(0, 30), keep=st.integers(0, 10))
    def reserve(self, data: st.DataObject, extra: int, keep: int) -> None:
        seq_id = self.pick(data)
        n_tokens = len(self.sequences[seq_id].tokens) + extra
        before, covered, evicted = self.kv.counts(), self.kv.covered(seq_id), self.kv.n_evictions
        table = self.kv.tables(seq_id)[0].frames(0, covered // FRAME)
        need = max(0, frames_for(n_tokens) - covered // FRAME)
        done = self.kv.reserve(seq_id, n_tokens, keep=keep)
        assert done == (need <= before.free + before.cached)
        taken = (self.kv.covered(seq_id) - covered) // FRAME
        if not done:
            assert self.kv.counts() == before
            return
        assert taken >= need
        assert taken == need or before.free + before.cached - taken >= keep, "a larger page ate frames that were to be kept"
        assert taken < need + 8 or not need
        assert self.kv.tables(seq_id)[0].frames(0, covered // FRAME) == table, "reserving changed the frames before"
        gone = self.kv.n_evictions - evicted
        assert gone <= max(0, need + 7 - before.free)
        assert not gone or need
        self.forget_evicted(gone)

    def forget_evicted(self, count: int) -> None:
        """Which prefixes went is the tree's business (its own tests say which); they were idle, and nothing builds on them."""
        held = {frame for _, _, node in self.kv._store._cache._tree.nodes() for frame in node.frames}
        gone = [key for key, frame in self.tree.items() if frame not in held]
        assert len(gone) == count
        for key in gone:
            assert not self.live(key)
            del self.tree[key]
        assert all((key[0], key[1][:-FRAME]) in self.tree for key in self.tree if len(key[1]) > FRAME)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute_and_commit(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        sequence = self.sequences[seq_id]
        limit = min(len(sequence.tokens), self.kv.covered(seq_id))
        computed = data.draw(st.integers(sequence.computed, max(limit, sequence.computed)))
        own = self.kv.tables(seq_id)[0].frames(0, computed // FRAME)
        self.kv.commit(seq_id, sequence.tokens, computed)
        sequence.computed = computed
        if self.shares:
            keys = self.keys(sequence.tokens[:computed], sequence.salt)
            for key, frame in zip(keys, own, strict=True):
                self.tree.setdefault(key, frame)
            sequence.shared = len(keys)
            assert self.kv.tables(seq_id)[0].frames(0, len(keys)) == [self.tree[key] for key in keys]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=tails)
    def sample(self, data: st.DataObject, tokens: list[int]) -> None:
        self.sequences[self.pick(data)].tokens += tokens

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), extra=st.integers(0, 30))
    def truncate(self, data: st.DataObject, extra: int) -> None:
        seq_id = self.pick(data)
        n_tokens = self.sequences[seq_id].computed + extra
        before = self.kv.covered(seq_id)
        self.kv.truncate(seq_id, n_tokens)
        assert self.kv.covered(seq_id) == min(before, frames_for(n_tokens) * FRAME)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        available, promised = self.kv.available, self.kv.releasable(seq_id)
        self.kv.release(seq_id)
        del self.sequences[seq_id]
        assert self.kv.available == available + promised

    @invariant()
    def owners_and_counts_agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        idle = sum(not self.live(key) for key in self.tree)
        private = sum(self.kv.covered(i) // FRAME - s.shared for i, s in self.sequences.items())
        counts = self.kv.counts()
        assert (counts.cached, counts.held) == (idle, private + len(self.tree) - idle)
        assert counts.free + counts.cached + counts.held == counts.total


TestManager = Machine.TestCase
TestManager.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_at_least_one_prompt_token_is_always_computed() -> None:
    kv = manager(16)
    tokens = list(range(3 * FRAME))
    run(kv, "a", tokens)
    assert kv.match(tokens, "").frames == 2
    assert run(kv, "b", tokens) == 2 * FRAME
    assert run(kv, "c", [*tokens, 5]) == 3 * FRAME
    assert kv.match(tokens[:1], "").frames == kv.match([], "").frames == 0


def test_a_running_sequence_shares_its_full_frames_at_once() -> None:
    kv = manager(16)
    tokens = list(range(40))
    kv.acquire("a", tokens, "")
    kv.reserve("a", 40)
    kv.commit("a", tokens, 20)
    assert kv.acquire("b", tokens, "") == 16
    assert kv.tables("a")[0].frames(0, 2) == kv.tables("b")[0].frames(0, 2)


def test_two_that_computed_the_same_end_with_one_copy() -> None:
    kv = manager(16)
    tokens = list(range(24))
    for name in "ab":
        kv.acquire(name, tokens, "")
        kv.reserve(name, 24)
    assert kv.n_held == 6
    kv.commit("a", tokens, 24)
    kv.commit("b", tokens, 24)
    kv.check_integrity()
    assert kv.n_held == 3
    assert kv.tables("a")[0].frames(0, 3) == kv.tables("b")[0].frames(0, 3)


def test_a_refused_reservation_changes_nothing() -> None:
    kv = manager(8)
    run(kv, "a", [1] * 40)
    kv.release("a")
    kv.acquire("b", [2], "")
    before = kv.counts()
    assert not kv.reserve("b", 9 * FRAME)
    assert kv.counts() == before
    assert kv.reserve("b", 8 * FRAME)
    assert kv.n_evictions == 5


def test_a_fragmented_pool_gives_smaller_pages_rather_than_refusing() -> None:
    kv = manager(16)
    for name in range(16):
        run(kv, name, [name] * 8)
    for name in range(0, 16, 2):
        kv.release(name)
    kv.acquire("b", [99], "")
    assert kv.reserve("b", 8 * FRAME)
    assert (len(kv.tables("b")[0].first), kv.available) == (8, 0)
    kv.check_integrity()


def test_growth_in_a_pool_full_of_cache_still_gets_large_pages() -> None:
    kv = manager(2048 + 56)
    kv.acquire("long", [1], "")
    assert kv.reserve("long", 16384)
    run(kv, "other", [2] * (56 * FRAME))
    kv.release("other")
    assert kv.n_free == 0
    assert kv.reserve("long", 16385)
    assert (kv.covered("long"), kv.n_evictions) == (16384 + 64, 8)
    assert kv.reserve("long", 16384 + 65, keep=kv.available - 1)
    assert kv.covered("long") == 16384 + 72, "but not at the price of frames that are to be kept"


def test_reuse_off_computes_everything_but_still_ends_in_the_tree() -> None:
    kv = manager(16)
    tokens = list(range(24))
    run(kv, "a", tokens)
    assert run(kv, "b", tokens, limit=0) == 0
    assert kv.n_held == 3


def test_without_prefix_sharing_nothing_is_found_or_kept() -> None:
    for config in ({"enable_prefix_sharing": False}, {"prefix_sharing_strategy": "none"}):
        kv = manager(16, **config)
        tokens = list(range(24))
        run(kv, "a", tokens)
        assert run(kv, "b", tokens) == 0
        kv.release("a")
        kv.release("b")
        assert kv.counts().free == 16


def test_rollback_keeps_shared_frames() -> None:
    kv = manager(16)
    run(kv, "a", list(range(20)))
    assert kv.reserve("a", 50)
    kv.truncate("a", 20)
    assert kv.covered("a") == 24
    with pytest.raises(AssertionError, match="2 shared frames"):
        kv.truncate("a", 8)


def test_a_long_prompt_in_a_fresh_pool_is_one_extent() -> None:
    kv = manager(128)
    kv.acquire("a", [1] * 800, "")
    kv.reserve("a", 800)
    assert (len(kv.tables("a")[0].first), kv.tables("a")[0].n_frames) == (1, 100)


def test_a_leaked_frame_fails_the_integrity_check() -> None:
    kv = manager(8)
    kv._store._pool.allocate(1)
    with pytest.raises(AssertionError, match="1 frames have no owner"):
        kv.check_integrity()


def test_a_frame_with_two_owners_fails_the_integrity_check() -> None:
    kv = manager(8)
    for name in "ab":
        kv.acquire(name, [1], "")
        kv.reserve(name, 1)
    kv.tables("b")[0].replace(0, kv.tables("a")[0].frames(0, 1))
    with pytest.raises(AssertionError, match="belongs to"):
        kv.check_integrity()


def test_a_wrong_reference_count_fails_the_integrity_check() -> None:
    kv = manager(8)
    run(kv, "a", [1] * 8)
    kv._holdings["a"].node.refs += 1
    with pytest.raises(AssertionError, match="reference count"):
        kv.check_integrity()


def test_ladders_are_kept_for_a_bounded_number_of_budgets() -> None:
    """Budgets come from clients."""
    kv = KVManager([KVGroup("all", Whole(), ((0, 0),))], 64, BlockManagerConfig())
    first = kv.ladder(1)
    assert kv.ladder(1) is first
    for budget in range(2, 2 * LADDERS):
        assert kv.ladder(budget).budget == budget
        assert len(kv._ladders) <= LADDERS
