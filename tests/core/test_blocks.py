"""Names of prefixes."""

from __future__ import annotations

import random
import struct
from hashlib import blake2b

import pytest

from tokenmill.core.blocks import BlockHasher, block_hashes


def by_definition(tokens: list[int], salt: str, fingerprint: str, block: int) -> list[bytes]:
    def digest(data: bytes, person: bytes) -> bytes:
        return blake2b(data, digest_size=16, person=person).digest()

    texts = b"".join(len(text.encode()).to_bytes(8, "little") + text.encode() for text in (fingerprint, salt))
    last, found = digest(block.to_bytes(4, "little") + texts, b"tokenmill root"), []
    for start in range(0, len(tokens) // block * block, block):
        last = digest(last + b"".join(struct.pack("<i", token) for token in tokens[start : start + block]), b"tokenmill block")
        found.append(last)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_hashes_are_those_of_the_definition_in_whatever_pieces_tokens_come(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(2**31) for _ in range(rng.randrange(600))]
    salt, fingerprint, block = rng.choice(["", "tenant", "ten\u00e4nt"]), rng.choice(["f", "abc"]), rng.choice([8, 64, 128])
    expected = by_definition(tokens, salt, fingerprint, block)
    assert block_hashes(tokens, salt, fingerprint, block) == expected, f"seed {seed}"
    hasher, given, at = BlockHasher(salt, fingerprint, block), list[bytes](), 0
    while at < len(tokens):
        size = rng.choice([0, 1, 7, 64, 300])
        given += hasher.feed(tokens[at : at + size])
        at += size
        assert given == hasher.hashes == expected[: min(at, len(tokens)) // block], f"seed {seed}"


def test_only_whole_blocks_have_a_hash() -> None:
    assert [len(block_hashes([1] * n, "", "f")) for n in (0, 63, 64, 127, 128)] == [0, 0, 1, 1, 2]
    assert {len(name) for name in block_hashes([1] * 128, "", "f")} == {16}


def test_a_token_changes_its_block_and_all_after_it() -> None:
    tokens = list(range(320))
    changed = [*tokens[:100], 7, *tokens[101:]]
    before, after = block_hashes(tokens, "", "f"), block_hashes(changed, "", "f")
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, False, False, False]


def test_equal_blocks_after_different_ones_differ() -> None:
    assert block_hashes([1] * 64 + [3] * 64, "", "f")[1] != block_hashes([2] * 64 + [3] * 64, "", "f")[1]


def test_salt_fingerprint_and_block_length_each_change_every_name() -> None:
    roots = [("", "f", 64), ("", "f", 128), ("a", "f", 64), ("", "g", 64), ("f", "", 64), ("b", "ca", 64), ("bc", "a", 64)]
    chains = [block_hashes([5] * 128, *root) for root in roots]
    names = [name for chain in chains for name in chain]
    assert len(set(names)) == len(names)


def test_names_are_the_same_in_every_process_and_version() -> None:
    """A KV store outlives the process that filled it: who changes these changes a format."""
    names = block_hashes(list(range(128)), "tenant", "fingerprint")
    assert [name.hex() for name in names] == ["be908473458c4a7cd315d36779dede04", "a0fa5a0ee67b06b939286b1380a32eff"]


@pytest.mark.parametrize("block", [0, -8, 12])
def test_blocks_that_are_no_whole_frames_are_our_own_fault(block: int) -> None:
    with pytest.raises(AssertionError, match=f"blocks of {block} tokens"):
        BlockHasher("", "f", block)
