"""Workers with a store: what one has computed, another finds."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from store_blocks import SCOPE, key, label, payload
from store_servers import HASTY, LONG, PATIENT, Server, until
from test_reader import SIZE, Waiter

from tokenmill.core.errors import ConfigError
from tokenmill.transfer.store.counts import Count
from tokenmill.transfer.store.disk import DiskPolicy
from tokenmill.transfer.store.entry import Label, Scope
from tokenmill.transfer.store.service import KVStore, StorePolicy
from tokenmill.transfer.store.writer import WriterPolicy

WELL = StorePolicy(remote=PATIENT)


@contextlib.contextmanager
def worker(url: str | None, folder: Path | None = None, policy: StorePolicy = WELL) -> Iterator[KVStore]:
    store = KVStore.open(url, folder, SIZE, policy)
    try:
        yield store
    finally:
        store.close(LONG)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-store")]


def compute(store: KVStore, count: int) -> None:
    for number in range(count):
        if store.wants(key(number), SIZE):
            store.keep(label(number), payload(number))


def bring(store: KVStore, count: int, scope: Scope = SCOPE) -> list[bytes]:
    waiter = Waiter()
    store.fetch(waiter.wants(range(count), scope=scope))
    return waiter.got()


def test_what_one_worker_computed_another_fetches(server: Server, tmp_path: Path) -> None:
    with worker(server.url) as first, worker(server.url, tmp_path / "kv") as second:
        compute(first, 20)
        assert first.drain(LONG)
        assert bring(second, 25) == [payload(number) for number in range(20)]
        server.kill()
        assert bring(second, 25) == [payload(number) for number in range(20)], "it is nearer now"


def test_what_was_kept_is_stored_at_the_end(server: Server) -> None:
    with worker(server.url) as first:
        compute(first, 20)
    with worker(server.url) as second:
        assert len(bring(second, 25)) == 20


def test_a_folder_alone_is_a_store(tmp_path: Path) -> None:
    with worker(None, tmp_path / "kv") as first:
        compute(first, 5)
    with worker(None, tmp_path / "kv") as second:
        assert len(bring(second, 5)) == 5


def test_no_tenant_sees_anothers_blocks_even_under_the_same_keys(server: Server) -> None:
    with worker(server.url) as store:
        compute(store, 3)
        store.drain(LONG)
        assert bring(store, 3, Scope.of("model", "another tenant")) == []
        assert store.counts()["rejected_tenant"] == 1


def test_a_block_that_was_damaged_is_stored_anew_by_who_computes_it(server: Server) -> None:
    with worker(server.url) as store:
        compute(store, 4)
        store.drain(LONG)
        client = server.client()
        (name,) = [name for name in client.keys("*") if name.endswith(key(2).hex().encode())]
        client.setrange(name, 500, b"damage")
        assert bring(store, 4) == [payload(0), payload(1)]
        assert not client.exists(name)
        compute(store, 4)
        store.drain(LONG)
        assert len(bring(store, 4)) == 4
        client.close()


def test_what_the_server_has_forgotten_is_stored_anew(server: Server) -> None:
    with worker(server.url) as store:
        compute(store, 4)
        store.drain(LONG)
        client = server.client()
        client.flushall()
        client.close()
        assert bring(store, 4) == []
        assert store.wants(key(0), SIZE)


def test_a_store_that_is_down_costs_neither_who_fetches_nor_who_keeps(tmp_path: Path) -> None:
    policy = StorePolicy(remote=HASTY, writer=WriterPolicy(queued=5 * SIZE))
    with worker(f"unix://{tmp_path}/nothing", policy=policy) as store:
        for _ in range(50):
            assert bring(store, 5) == []
        compute(store, 100)
        assert store.drain(LONG)
        counts = store.counts()
        assert counts["written"] == 0
        assert counts["offered"] == counts["unwritten"]


def test_a_server_frozen_under_load_delays_nobody_for_ever(server: Server) -> None:
    with worker(server.url, policy=StorePolicy(remote=HASTY)) as store:
        compute(store, 10)
        store.drain(LONG)
        server.signal(signal.SIGSTOP)
        waiters = [Waiter() for _ in range(20)]
        for waiter in waiters:
            store.fetch(waiter.wants(range(10)))
        compute(store, 40)
        assert [waiter.got() for waiter in waiters] == [[]] * 20
        assert store.drain(LONG)
        server.signal(signal.SIGCONT)
        until(lambda: len(bring(store, 10)) == 10)


def test_a_store_is_a_server_or_a_folder() -> None:
    with pytest.raises(ConfigError, match="a server, a folder, or both"):
        KVStore.open(None, None, SIZE)
    with pytest.raises(ConfigError, match="valkey://"):
        KVStore.open("ftp://h", None, SIZE)


def test_workers_that_come_and_go_see_only_whole_blocks_of_their_own(server: Server, tmp_path: Path) -> None:
    """Several texts and tenants, three workers with one server and one small folder, everything at random."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    policy = StorePolicy(remote=PATIENT, disk=DiskPolicy(limit=60 * 1096), writer=WriterPolicy(known_for=0.05))
    tenants = [Scope.of("model", name) for name in ("", "a", "b")]

    def of(tenant: int, number: int) -> int:
        return 1000 * (tenant + 1) + number

    def work(me: int) -> int:
        source, found = random.Random(seed + me), 0
        store = KVStore.open(server.url, tmp_path / "kv", SIZE, policy)
        try:
            for _ in range(40):
                tenant, count = source.randrange(3), source.randrange(1, 30)
                names = [key(of(tenant, number)) for number in range(count)]
                waiter = Waiter()
                store.fetch(waiter.wants(range(count), keys=names, scope=tenants[tenant]))
                got = waiter.got()
                assert got == [payload(of(tenant, number)) for number in range(len(got))]
                found += len(got)
                for number in range(len(got), count):
                    parent = {"parent": names[number - 1]} if number else {}
                    store.keep(Label(scope=tenants[tenant], key=names[number], **parent), payload(of(tenant, number)))
        finally:
            store.close(LONG)
        return found

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(work, range(3))) > 0


def test_a_worker_that_is_killed_leaves_a_store_that_is_whole(server: Server, tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from store_blocks import label, payload
from tokenmill.transfer.store.service import KVStore
store = KVStore.open(sys.argv[1], Path(sys.argv[2]), 1000)
for number in range(100000):
    store.keep(label(number), payload(number))
    if number == 50:
        store.drain(60)
        print("begun", flush=True)
"""
    command = [sys.executable, "-c", script, server.url, str(tmp_path / "kv")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.kill()
    with worker(server.url, tmp_path / "kv") as store:
        got = bring(store, 500)
        assert len(got) >= 51
        assert got == [payload(number) for number in range(len(got))]
        assert not [name for name, count in store.counts().items() if name.startswith("rejected") and count]


def test_every_count_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kv-store.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    assert {str(count) for count in Count} <= set(re.findall(r"`([a-z_]+)`", " ".join(rows)))


def test_every_setting_of_a_part_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kv-store.md").read_text()
    named = set(re.findall(r"`([a-z_.]+)`", page))
    parts = {field.name: type(field.default) for field in msgspec.structs.fields(StorePolicy)}
    for part, policy in parts.items():
        for field in msgspec.structs.fields(policy):
            assert f"{part}.{field.name}" in named or field.name in ("link", "backoff"), f"{part}.{field.name}"
