"""The prefix tree against a slow twin: a dict from every prefix to its frame."""

import random

import pytest

from tokenmill.core.types import FRAME
from tokenmill.kv.prefix_tree import Node, PrefixTree

Key = tuple[str, tuple[int, ...]]


class SlowTree:
    """One entry per frame, keyed by the salt and all tokens up to the frame's end."""

    def __init__(self) -> None:
        self.frame: dict[Key, int] = {}
        self.last_used: dict[Key, int] = {}
        self.references: list[Key] = []
        self.tick = 0

    def keys(self, tokens: list[int], salt: str) -> list[Key]:
        return [(salt, tuple(tokens[:end])) for end in range(FRAME, len(tokens) + 1, FRAME)]

    def live(self, key: Key) -> bool:
        return any(salt == key[0] and tokens[: len(key[1])] == key[1] for salt, tokens in self.references)

    def match(self, tokens: list[int], salt: str) -> list[Key]:
        found = []
        for key in self.keys(tokens, salt):
            if key not in self.frame:
                break
            found.append(key)
        return found

    def extend(self, tokens: list[int], salt: str, start: int, frames: list[int]) -> list[int]:
        keys = self.keys(tokens, salt)[start:]
        for key, frame in zip(keys, frames, strict=True):
            self.frame.setdefault(key, frame)
            self.last_used.setdefault(key, 0)
        return [self.frame[key] for key in keys]

    def release(self, key: Key) -> None:
        self.references.remove(key)
        self.tick += 1
        for other in self.frame:
            if other[0] == key[0] and key[1][: len(other[1])] == other[1] and not self.live(other):
                self.last_used[other] = self.tick

    def idle(self) -> list[Key]:
        return [key for key in self.frame if not self.live(key)]

    def evict(self) -> int:
        """Drop the least recently used entry that no longer one builds on."""
        parents = {(salt, tokens[:-FRAME]) for salt, tokens in self.frame}
        leaves = [key for key in self.idle() if key not in parents]
        key = min(leaves, key=lambda leaf: self.last_used[leaf])
        del self.last_used[key]
        return self.frame.pop(key)


def random_tokens(rng: random.Random) -> list[int]:
    """Frames that often agree, and differ only in their last token when they do not."""
    return [token for _ in range(rng.randint(0, 7)) for token in (*[7] * (FRAME - 1), rng.choice((1, 1, 2)))]


@pytest.mark.parametrize("seed", range(60))
def test_random_use_agrees_with_a_dict_of_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    tree, twin = PrefixTree(), SlowTree()
    held: list[tuple[Node, list[int], str]] = []
    next_frame = 0
    for _ in range(120):
        kind = rng.random()
        salt = rng.choice(("", "tenant"))
        if kind < 0.3:
            tokens = random_tokens(rng)
            found = twin.match(tokens, salt)
            hit = tree.match(tokens, salt)
            assert hit == (len(found), sum(not twin.live(key) for key in found), len(found)), f"seed {seed}"
            keys, live = tree.find(tokens, salt)
            assert (len(keys), len(keys) - live) == hit[:2], f"seed {seed}"
            node, frames = tree.acquire(tokens, salt)
            assert frames == [twin.frame[key] for key in found], f"seed {seed}"
            held.append((node, tokens[: len(found) * FRAME], salt))
            twin.references.append((salt, tuple(held[-1][1])))
        elif kind < 0.65 and held:
            at = rng.randrange(len(held))
            node, tokens, salt = held[at]
            more = random_tokens(rng) or [3] * FRAME
            count = len(more) // FRAME
            offered = list(range(next_frame, next_frame + count))
            next_frame += count
            twin.references.remove((salt, tuple(tokens)))
            twin.references.append((salt, tuple(tokens + more)))
            expected = twin.extend(tokens + more, salt, len(tokens) // FRAME, offered)
            node, kept = tree.extend(node, more, offered)
            assert kept == expected, f"seed {seed}"
            held[at] = (node, tokens + more, salt)
        elif kind < 0.85 and held:
            node, tokens, salt = held.pop(rng.randrange(len(held)))
            idle = tree.n_idle
            would = tree.would_idle(node)
            tree.release(node)
            twin.release((salt, tuple(tokens)))
            assert tree.n_idle == idle + would, f"seed {seed}"
        elif tree.n_idle:
            count = rng.randint(1, tree.n_idle)
            assert sorted(tree.evict(count)) == sorted(twin.evict() for _ in range(count)), f"seed {seed}"
        assert (tree.n_frames, tree.n_idle) == (len(twin.frame), len(twin.idle())), f"seed {seed}"
        tree.check_integrity([node for node, _, _ in held])
    for node, _, _ in held:
        tree.release(node)
    tree.evict(tree.n_idle)
    assert tree.n_frames == 0
    assert not tree._roots, "an empty namespace is remembered"
    assert not tree._queue, "a removed node is still queued"


def filled(tree: PrefixTree, tokens: list[int], first: int, salt: str = "") -> Node:
    node, known = tree.acquire(tokens, salt)
    start = len(known)
    count = len(tokens) // FRAME - start
    return tree.extend(node, tokens[start * FRAME :], list(range(first, first + count)))[0] if count else node


def test_a_reference_protects_its_ancestors_but_not_its_descendants() -> None:
    tree = PrefixTree()
    tokens = list(range(6 * FRAME))
    tree.release(filled(tree, tokens, 0))
    node, frames = tree.acquire(tokens[: 2 * FRAME], "")
    assert frames == [0, 1]
    assert sorted(tree.evict(4)) == [2, 3, 4, 5]
    with pytest.raises(AssertionError, match="only 0 are idle"):
        tree.evict(1)
    tree.release(node)
    assert tree.evict(2) == [0, 1]


def test_eviction_takes_the_tail_of_the_least_recently_used_run() -> None:
    tree = PrefixTree()
    old, new = [1] * 4 * FRAME, [2] * 4 * FRAME
    tree.release(filled(tree, old, 0))
    tree.release(filled(tree, new, 4))
    assert tree.evict(3) == [1, 2, 3]
    assert tree.match(old, "").frames == 1
    assert tree.match(new, "").frames == 4


def test_using_a_prefix_again_makes_it_the_last_to_go() -> None:
    tree = PrefixTree()
    old, new = [1] * 2 * FRAME, [2] * 2 * FRAME
    tree.release(filled(tree, old, 0))
    tree.release(filled(tree, new, 2))
    tree.release(tree.acquire(old, "")[0])
    assert sorted(tree.evict(2)) == [2, 3]


def test_salts_do_not_see_each_other() -> None:
    tree = PrefixTree()
    tokens = [1] * 2 * FRAME
    filled(tree, tokens, 0, "a")
    assert tree.match(tokens, "a").frames == 2
    assert tree.match(tokens, "b").frames == 0
    assert tree.match(tokens, "").frames == 0


def test_a_sequence_that_decodes_alone_stays_one_node() -> None:
    tree = PrefixTree()
    node = filled(tree, [1] * FRAME, 0)
    for frame in range(1, 50):
        node, _ = tree.extend(node, [frame] * FRAME, [frame])
    assert len(list(tree.nodes())) == 1
    assert tree.path(node) == list(range(50))


def test_the_eviction_queue_does_not_grow_with_reuse() -> None:
    tree = PrefixTree()
    tokens = [1] * 4 * FRAME
    tree.release(filled(tree, tokens, 0))
    for _ in range(1000):
        tree.release(tree.acquire(tokens, "")[0])
    assert len(tree._queue) == 1
