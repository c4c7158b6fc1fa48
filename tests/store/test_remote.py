"""Against a real server that is well."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from store_blocks import entries, entry, key, keys, room, same
from store_servers import LONG, PATIENT, Server, free_port, until

from tokenmill.transfer.store.address import parse_address
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.remote import PREFIX, RemotePolicy, RemoteStore

ENTRY = 1096


@pytest.fixture
def store(server: Server, counts: Counts) -> Iterator[RemoteStore]:
    opened = RemoteStore(server.address, ENTRY, counts, PATIENT)
    yield opened
    opened.close()


def changed(**options: object) -> RemotePolicy:
    return msgspec.structs.replace(PATIENT, **options)


def test_what_was_put_is_found_and_comes_back(store: RemoteStore, counts: Counts) -> None:
    stored = entries(5)
    assert store.find(keys(5)) == 0
    assert store.get(keys(5), room()) == []
    assert store.put(stored) == [True] * 5
    assert store.find(keys(5)) == 5
    assert same(store.get(keys(5), room()), stored)
    assert counts[Count.REMOTE_HITS] == 5
    assert counts[Count.REMOTE_FAILURES] == 0


def test_only_what_follows_without_a_gap_is_found(store: RemoteStore) -> None:
    stored = entries(6)
    store.put([*stored[:3], *stored[4:]])
    assert store.find(keys(6)) == 3
    assert same(store.get(keys(6), room()), stored[:3])
    assert store.find(keys(6)[3:]) == 0
    assert same(store.get(keys(6)[4:], room()), stored[4:])


def test_nothing_is_asked_for_nothing(store: RemoteStore) -> None:
    assert (store.find([]), store.get([], room()), store.put([])) == (0, [], [])
    store.discard([])


@pytest.mark.parametrize(("count", "space"), [(600, 1 << 20), (20, ENTRY), (20, 2 * ENTRY), (20, 7 * ENTRY + 5)])
def test_many_are_brought_in_batches_that_fit(server: Server, counts: Counts, count: int, space: int) -> None:
    store = RemoteStore(server.address, ENTRY, counts, changed(at_once=3 * ENTRY))
    stored = entries(count)
    assert store.put(stored) == [True] * count
    assert store.find(keys(count)) == count
    got = store.get(keys(count), room(space))
    assert same(got, stored[: space // ENTRY])
    store.close()


def test_a_gap_at_the_edge_of_a_batch_is_a_gap(server: Server, counts: Counts) -> None:
    store = RemoteStore(server.address, 1 << 19, counts, PATIENT)  # two at a time into 1 MiB
    stored = entries(6)
    store.put([*stored[:2], *stored[4:]])
    assert same(store.get(keys(6), room()), stored[:2])
    store.close()


def test_an_entry_that_is_too_long_for_the_room_ends_what_is_got(store: RemoteStore) -> None:
    stored = entries(3)
    stored[1] = (key(1), entry(1, 50_000))
    store.put(stored)
    assert same(store.get(keys(3), room(5 * ENTRY)), stored[:1])
    assert same(store.get(keys(3)[2:], room(5 * ENTRY)), stored[2:])


def test_any_kind_of_bytes_is_put(store: RemoteStore) -> None:
    data = entry(0, 50_000)
    store.put([(key(0), data), (key(1), bytearray(data)), (key(2), memoryview(data)[:])])
    assert [bytes(got) for got in store.get(keys(3), room())] == [data] * 3


def test_what_is_there_already_is_not_sent_again_but_lives_on(server: Server, store: RemoteStore) -> None:
    (first, *_) = stored = entries(2)
    store.put([first])
    name = PREFIX + first[0].hex().encode()
    client = server.client()
    assert 3500 < client.ttl(name) <= 3600
    client.expire(name, 50)
    before = client.info("stats")["total_net_input_bytes"]
    assert store.put([(first[0], bytes(1_000_000)), stored[1]]) == [True, True]
    assert client.info("stats")["total_net_input_bytes"] - before < 10_000
    assert client.ttl(name) > 3500
    assert same(store.get(keys(2), room()), stored)
    client.close()


def test_entries_end_with_their_time(server: Server, counts: Counts) -> None:
    store = RemoteStore(server.address, ENTRY, counts, changed(ttl=1))
    store.put(entries(2))
    until(lambda: store.find(keys(2)) == 0)
    assert store.get(keys(2), room()) == []
    store.close()


def test_what_is_discarded_can_be_put_anew(store: RemoteStore) -> None:
    stored = entries(3)
    store.put([(of, b"damaged") for of, _ in stored])
    store.discard(keys(2))
    assert store.find(keys(3)) == 0
    store.put(stored)
    assert [bytes(got) for got in store.get(keys(3), room())] == [stored[0][1], stored[1][1], b"damaged"]


def test_a_full_server_that_drops_what_it_had_takes_what_is_new(tmp_path: Path, counts: Counts) -> None:
    with Server(tmp_path, "maxmemory 24mb", "maxmemory-policy allkeys-lru") as server:
        store = RemoteStore(server.address, 1_000_096, counts, PATIENT)
        for number in range(60):
            assert store.put([(key(number), entry(number, 1_000_000))]) == [True]
            assert same(store.get([key(number)], room(2 << 20)), [(key(number), entry(number, 1_000_000))])
        client = server.client()
        assert client.info("memory")["used_memory"] < 26 << 20
        assert 5 < client.dbsize() < 24
        assert sum(store.find([of]) for of in keys(60)) == client.dbsize()
        client.close()
        store.close()
    assert counts[Count.REMOTE_REFUSED] == 0


@pytest.mark.parametrize("login", ["", ":secret@", "reader:words@"])
def test_over_tcp_with_a_database_and_who_one_is(tmp_path: Path, counts: Counts, login: str) -> None:
    port = free_port()
    lines = [f"port {port}", "bind 127.0.0.1"]
    if login == ":secret@":
        lines.append("requirepass secret")
    if login == "reader:words@":
        lines += ["user default off", "user reader on >words ~tokenmill:kv:* +mget +exists +expire +set +unlink +ping +select"]
    with Server(tmp_path, *lines):
        store = RemoteStore(parse_address(f"valkey://{login}127.0.0.1:{port}/3"), ENTRY, counts, PATIENT)
        other = RemoteStore(parse_address(f"redis://{login}localhost:{port}/4"), ENTRY, counts, PATIENT)
        stored = entries(3, 100_000)
        assert store.put(stored) == [True] * 3
        assert same(store.get(keys(3), room()), stored)
        assert other.find(keys(3)) == 0
        store.close()
        other.close()
    assert counts[Count.REMOTE_FAILURES] == 0


def test_two_processes_share_it(server: Server, store: RemoteStore) -> None:
    script = """
import sys
from store_blocks import entries, keys, room, same
from store_servers import PATIENT
from tokenmill.transfer.store.address import parse_address
from tokenmill.transfer.store.counts import Counts
from tokenmill.transfer.store.remote import RemoteStore
store = RemoteStore(parse_address(sys.argv[1]), 1096, Counts(), PATIENT)
assert same(store.get(keys(4), room()), entries(4))
assert store.put(entries(9)) == [True] * 9
store.close()
"""
    store.put(entries(4))
    folder = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", script, server.url], check=True, timeout=LONG, cwd=folder)
    assert same(store.get(keys(9), room()), entries(9))
