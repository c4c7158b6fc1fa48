"""The index of prefixes against plain sets, and what it forgets."""

from __future__ import annotations

import random

import pytest

from tokenmill.cluster.prefixes import LEVELS, PrefixIndex

Chain = list[bytes]


def chain(*texts: str) -> Chain:
    """Blocks as a hash chain names them: each by all text up to its end."""
    return ["/".join(texts[: end + 1]).encode() for end in range(len(texts))]


def check(index: PrefixIndex) -> None:
    """Both directions say the same, and the count is right."""
    pairs = {(block, holder) for block, holders in index._holders.items() for holder in holders}
    assert pairs == {(block, holder) for holder, blocks in index._blocks.items() for block in blocks}
    assert len(pairs) == len(index) == sum(len(holders) for holders in index._holders.values())
    assert all(index._blocks.values())
    assert len(index) <= index._room


def random_chain(rng: random.Random) -> Chain:
    return chain(*(rng.choice("ab") for _ in range(rng.randint(1, 9))))


@pytest.mark.parametrize("seed", range(30))
def test_random_reports_evictions_and_leaves_agree_with_plain_sets(seed: int) -> None:
    rng = random.Random(seed)
    index, twin = PrefixIndex(10_000), dict[str, set[bytes]]()
    for step in range(200):
        name, blocks = f"w{rng.randrange(5)}", random_chain(rng)
        match rng.randrange(8):
            case 0 | 1 | 2 | 3 | 4:
                index.add(name, blocks)
                twin.setdefault(name, set()).update(blocks)
            case 5 | 6:
                # A worker evicts a block with all that go on from it, and tells of some that it never had, in any order.
                gone = [block for block in twin.get(name, ()) if block.startswith(blocks[-1])] + [b"never"]
                rng.shuffle(gone)
                index.remove(name, gone)
                twin.setdefault(name, set()).difference_update(gone)
            case 7 if rng.random() < 0.3:
                index.leave(name)
                twin.pop(name, None)
        check(index)
        asked = random_chain(rng)
        depths = {name: next((at for at, block in enumerate(asked) if block not in known), len(asked)) for name, known in twin.items()}
        deepest = sorted({*depths.values()} - {0})[-LEVELS:]
        assert index.depths(asked) == {name: depth for name, depth in depths.items() if depth in deepest}, f"seed {seed}, step {step}"
        assert all(index.depth(name, asked) == depth for name, depth in depths.items()), f"seed {seed}, step {step}"
        assert len(index) == sum(map(len, twin.values()))


@pytest.mark.parametrize("seed", range(20))
def test_the_least_recently_told_blocks_are_forgotten_as_by_a_plain_list(seed: int) -> None:
    rng = random.Random(seed)
    index, twin = PrefixIndex(25), list[tuple[bytes, set[str]]]()
    forgotten = 0
    for step in range(300):
        name, blocks = f"w{rng.randrange(4)}", random_chain(rng)
        index.add(name, blocks)
        for block in reversed(blocks):
            holders = next((holders for known, holders in twin if known == block), set[str]())
            twin = [entry for entry in twin if entry[0] != block] + [(block, holders | {name})]
        while sum(len(holders) for _, holders in twin) > 25:
            del twin[0]
            forgotten += 1
        check(index)
        assert {block: set(holders) for block, holders in index._holders.items()} == dict(twin), f"seed {seed}, step {step}"
        for block in index._holders:  # who can be found at all can be found from the start
            assert block.rpartition(b"/")[0] in {b"", *index._holders}, f"seed {seed}, step {step}"
    assert forgotten > 50


def test_a_prefix_that_is_served_again_outlives_those_that_are_not_and_of_a_chain_its_end_goes_first() -> None:
    index = PrefixIndex(20)
    whole, other = chain(*"abcdefghij"), chain(*"0123456789")
    index.add("w0", whole)
    index.add("w1", other)
    index.add("w0", whole[:4])
    index.add("w1", chain(*"uvwxyz"))
    assert (index.depth("w0", whole), index.depth("w1", other)) == (4, 10)
    index.add("w1", chain(*"klmnopqr"))
    assert (index.depth("w0", whole), index.depth("w1", other)) == (4, 2)


def test_what_nobody_has_is_no_error() -> None:
    index = PrefixIndex(10)
    index.add("w0", [])
    index.remove("nobody", chain(*"ab"))
    index.leave("nobody")
    assert index.depths([]) == {}
    assert index.depths(chain(*"ab")) == {}
    assert index.depth("w0", chain(*"ab")) == 0
    check(index)


def test_of_many_depths_the_deepest_are_told_apart() -> None:
    index = PrefixIndex(100_000)
    long = [f"{number}".encode() for number in range(2000)]
    for number in range(100):
        index.add(f"w{number}", long[: 10 * (number + 1)])
    assert index.depths(long) == {f"w{number}": 10 * (number + 1) for number in range(100 - LEVELS, 100)}
    assert index.depths(long[:200]) == {f"w{number}": min(200, 10 * (number + 1)) for number in range(20 - LEVELS, 100)}


def test_an_eviction_in_the_middle_breaks_nothing() -> None:
    index = PrefixIndex(100)
    blocks = chain(*"abcdef")
    index.add("w0", blocks)
    index.add("w1", blocks)
    index.remove("w0", blocks[1:3])
    check(index)
    assert index.depths(blocks)["w1"] == 6
    index.leave("w0")
    index.leave("w1")
    assert len(index) == 0
