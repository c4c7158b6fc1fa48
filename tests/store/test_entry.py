from __future__ import annotations

import random

import pytest
from store_blocks import SCOPE, entry, key, label, payload

from tokenmill.transfer.store.entry import HEAD_BYTES, MAGIC, NO_PARENT, Label, Reason, Scope, flaw, pack, unpack


@pytest.mark.parametrize("size", [0, 1, 95, 1000, 2_000_000])
def test_a_block_comes_back_as_it_was(size: int) -> None:
    stored = pack(label(3), payload(3, size))
    assert len(stored) == HEAD_BYTES + size
    assert unpack(label(3), stored) == payload(3, size)
    assert flaw(key(3), stored) is None


def test_the_payload_is_a_view_and_no_copy() -> None:
    stored = bytearray(pack(label(3), b"abcd"))
    got = unpack(label(3), stored)
    assert isinstance(got, memoryview)
    stored[HEAD_BYTES] = ord("z")
    assert got == b"zbcd"


def test_what_may_be_stored_is_any_kind_of_bytes() -> None:
    kinds = [b"abcd", bytearray(b"abcd"), memoryview(b"xabcdx")[1:-1]]
    assert len({pack(label(1), kind) for kind in kinds}) == 1
    assert [unpack(label(1), kind(pack(label(1), b"abcd"))) for kind in (bytes, bytearray, memoryview)] == [b"abcd"] * 3


def test_the_format_is_the_one_that_other_versions_wrote() -> None:
    written = [
        b"TMKV".hex() + "0100" + "0000",
        "0300000000000000",
        "5b14f47a05082921dd1135057935dbee",
        "000102030405060708090a0b0c0d0e0f",
        "101112131415161718191a1b1c1d1e1f",
        "f20ea9ef9ed1caf63d2f29727d892569",
        "674f4873a2e5c1279923a28c9e620b92",
        b"abc".hex(),
    ]
    assert pack(Label(Scope.of("f", "t"), bytes(range(16)), bytes(range(16, 32))), b"abc").hex() == "".join(written)


def test_every_changed_bit_is_seen() -> None:
    stored = entry(1, 40)
    for at in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[at // 8] ^= 1 << at % 8
        assert isinstance(unpack(label(1), damaged), Reason), f"bit {at}"
        assert flaw(key(1), damaged) is not None, f"bit {at}"


def test_every_cut_is_seen() -> None:
    stored = entry(1, 40)
    assert {unpack(label(1), stored[:end]) for end in range(len(stored))} == {Reason.TRUNCATED}


def test_more_than_the_entry_is_corrupt() -> None:
    assert unpack(label(1), entry(1) + b"\0") is Reason.CORRUPT


def test_something_else_is_no_entry() -> None:
    assert unpack(label(1), bytes(500)) is Reason.NO_ENTRY
    seed = random.randrange(1 << 30)
    print("seed", seed)
    source = random.Random(seed)
    for _ in range(2000):
        garbage = source.randbytes(source.randrange(300))
        if source.random() < 0.5:
            garbage = MAGIC + b"\1\0" + garbage
        assert isinstance(unpack(label(1), garbage), Reason)


def test_another_version_is_not_read() -> None:
    stored = bytearray(entry(1))
    stored[4] += 1
    assert unpack(label(1), stored) is Reason.VERSION


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Label(Scope.of("other model", "tenant"), key(2), key(1)), Reason.FINGERPRINT),
        (Label(Scope.of("model", "other tenant"), key(2), key(1)), Reason.TENANT),
        (Label(Scope.of("model"), key(2), key(1)), Reason.TENANT),
        (Label(SCOPE, key(3), key(1)), Reason.KEY),
        (Label(SCOPE, key(2), key(0)), Reason.PARENT),
        (Label(SCOPE, key(2), NO_PARENT), Reason.PARENT),
    ],
)
def test_another_block_is_refused_for_what_differs(asked: Label, reason: Reason) -> None:
    assert unpack(asked, entry(2)) is reason


def test_an_entry_of_another_key_shows_without_its_label() -> None:
    assert flaw(key(2), entry(1)) is Reason.KEY


def test_nobody_is_no_tenant_and_no_name_is_in_an_entry() -> None:
    assert Scope.of("model") != Scope.of("model", "0")
    stored = pack(Label(Scope.of("secret model", "secret tenant"), key(1)), b"abc")
    assert b"secret" not in stored
