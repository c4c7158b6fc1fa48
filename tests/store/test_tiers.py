from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from store_blocks import SCOPE, entries, key, keys, room, same
from store_servers import PATIENT, Server

from tokenmill.transfer.store.counts import Counts
from tokenmill.transfer.store.disk import DiskPolicy, DiskStore
from tokenmill.transfer.store.entry import Data, Label, pack
from tokenmill.transfer.store.remote import RemoteStore
from tokenmill.transfer.store.tiers import Store, Tiers

ENTRY = 1096


class Twin:
    """A `Store` that is a dict, and counts what it is asked for."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.asked = 0
        self.closed = False

    def find(self, keys: Sequence[bytes]) -> int:
        self.asked += 1
        return next((number for number, of in enumerate(keys) if of not in self.entries), len(keys))

    def get(self, keys: Sequence[bytes], room: memoryview) -> list[memoryview]:
        self.asked += 1
        got: list[memoryview] = []
        for of in keys[: self.find(keys)]:
            data = self.entries[of]
            if len(data) > len(room):
                break
            room[: len(data)] = data
            got.append(room[: len(data)])
            room = room[len(data) :]
        return got

    def put(self, entries: Sequence[tuple[bytes, Data]]) -> list[bool]:
        for of, data in entries:
            self.entries.setdefault(of, bytes(data))
        return [True] * len(entries)

    def discard(self, keys: Sequence[bytes]) -> None:
        for of in keys:
            self.entries.pop(of, None)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pair() -> tuple[Twin, Twin]:
    return Twin(), Twin()


def test_what_is_put_is_in_all_and_what_is_discarded_in_none(pair: tuple[Twin, Twin]) -> None:
    tiers = Tiers(pair)
    tiers.put(entries(2))
    assert pair[0].entries == pair[1].entries == dict(entries(2))
    tiers.discard(keys(1))
    assert pair[0].entries == pair[1].entries == dict(entries(2)[1:])
    tiers.close()
    assert pair[0].closed
    assert pair[1].closed


def test_it_is_kept_if_one_has_kept_it(pair: tuple[Twin, Twin], tmp_path: Path) -> None:
    tiny = DiskStore(tmp_path, Counts(), DiskPolicy(limit=500))
    assert tiny.put(entries(1)) == [False]
    assert Tiers([tiny, pair[0]]).put(entries(2)) == [True, True]
    assert Tiers([tiny, tiny]).put(entries(2)) == [False, False]


@pytest.mark.parametrize("near", range(16))
@pytest.mark.parametrize("far", [0b0000, 0b0001, 0b0110, 0b1010, 0b1111, 0b0111])
def test_each_is_asked_for_what_those_before_it_lack(pair: tuple[Twin, Twin], near: int, far: int) -> None:
    stored = entries(4)
    for which, has in zip(pair, (near, far), strict=True):
        which.put([stored[number] for number in range(4) if has >> number & 1])
    either = near | far
    count = next((number for number in range(4) if not either >> number & 1), 4)
    tiers = Tiers(pair)
    assert tiers.find(keys(4)) == count
    assert same(tiers.get(keys(4), room()), stored[:count])
    assert set(keys(count)) <= set(pair[0].entries), "what came from afar is not near now"


def test_one_alone_is_asked_once(pair: tuple[Twin, Twin]) -> None:
    alone = Tiers(pair[:1])
    alone.put(entries(2))
    assert alone.find(keys(4)) == 2
    assert pair[0].asked == 1
    assert Tiers(pair).find(keys(4)) == 2
    assert (pair[0].asked, pair[1].asked) == (2, 1)


def test_a_damaged_file_is_brought_from_the_server_and_mended(server: Server, tmp_path: Path, counts: Counts) -> None:
    disk, remote = DiskStore(tmp_path / "kv", counts), RemoteStore(server.address, ENTRY, counts, PATIENT)
    tiers = Tiers([disk, remote])
    stored = entries(5)
    assert tiers.put(stored) == [True] * 5
    path = tmp_path / "kv" / key(2).hex()[:2] / f"{key(2).hex()}.kv"
    path.write_bytes(b"damaged")
    assert tiers.find(keys(5)) == 5
    assert same(tiers.get(keys(5), room()), stored)
    assert path.read_bytes() == stored[2][1]
    tiers.close()


class Twins:
    """A store under test and a dict, of which the same is asked."""

    def __init__(self, store: Store, seed: int, size: int) -> None:
        self._store = store
        self._twin = Twin()
        self._source = random.Random(seed)
        self._size = size
        self._space = room(1 << 17)

    def _some(self) -> list[bytes]:
        first = self._source.randrange(self._size)
        return [key(number) for number in range(first, first + self._source.randrange(12))]

    def step(self) -> None:
        wanted = self._some()
        match self._source.randrange(5):
            case 0 | 1:
                pairs = [(of, pack(Label(SCOPE, of), self._source.randbytes(self._source.randrange(900)))) for of in wanted]
                assert self._store.put(pairs) == self._twin.put(pairs)
            case 2:
                assert self._store.find(wanted) == self._twin.find(wanted)
            case 3:
                space = self._space[: self._source.choice([3000, len(self._space)])]
                theirs = [bytes(view) for view in self._twin.get(wanted, space)]
                assert [bytes(view) for view in self._store.get(wanted, space)] == theirs
            case 4:
                gone = wanted[:3]
                self._store.discard(gone)
                self._twin.discard(gone)


@pytest.mark.parametrize("kind", ["disk", "remote", "both"])
def test_any_operations_give_what_a_dict_gives(server: Server, tmp_path: Path, counts: Counts, kind: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    remote = RemoteStore(server.address, ENTRY, counts, msgspec.structs.replace(PATIENT, at_once=3 * ENTRY))
    disk = DiskStore(tmp_path / "kv", counts)
    stores: list[Store] = [disk, remote]
    twins = Twins({"disk": disk, "remote": remote, "both": Tiers(stores)}[kind], seed, 40)
    for _ in range(600):
        twins.step()
    remote.close()
