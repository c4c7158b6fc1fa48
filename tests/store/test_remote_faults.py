"""Against servers that refuse, are slow, talk nonsense, or are gone. Whatever happens, nothing is raised and everything ends in time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import random
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from store_blocks import entries, key, keys, room, same
from store_servers import HASTY, LONG, PATIENT, Server, free_port, until

from tokenmill.transfer.store.address import parse_address
from tokenmill.transfer.store.breaker import Backoff
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.link import LinkPolicy
from tokenmill.transfer.store.remote import RemotePolicy, RemoteStore

ENTRY = 1096
NEVER = Backoff(first=1000, longest=1000)


@contextlib.contextmanager
def opened(url: str, counts: Counts, policy: RemotePolicy) -> Iterator[RemoteStore]:
    store = RemoteStore(parse_address(url), ENTRY, counts, policy)
    try:
        yield store
    finally:
        store.close()


def with_backoff(policy: RemotePolicy, backoff: Backoff) -> RemotePolicy:
    return msgspec.structs.replace(policy, link=msgspec.structs.replace(policy.link, backoff=backoff))


def gives_nothing(store: RemoteStore) -> bool:
    return store.find(keys(2)) == 0 and store.get(keys(2), room()) == [] and store.put(entries(2)) == [False, False]


class Liar:
    """A server on a port that does to each connection what the test says."""

    def __init__(self, treat: Callable[[socket.socket], None]) -> None:
        self._treat = treat
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.url = f"valkey://127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self._treat(connection)

    @property
    def accepted(self) -> int:
        return len(self._connections)

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:secret@"])
def test_who_is_not_let_in_has_no_store(tmp_path: Path, counts: Counts, login: str, caplog: pytest.LogCaptureFixture) -> None:
    with Server(tmp_path, "requirepass secret") as server, opened(server.url.replace("//", f"//{login}"), counts, PATIENT) as store:
        assert gives_nothing(store)
    assert counts[Count.REMOTE_OPENINGS] == 1
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "wrong" not in record.message.lower().replace("wrongpass", "")
    assert "secret" not in record.message


def test_a_server_that_lets_nobody_in_is_used_as_soon_as_it_does(tmp_path: Path, counts: Counts) -> None:
    policy = with_backoff(PATIENT, Backoff(first=0.02, longest=0.05))
    with Server(tmp_path, "requirepass secret") as server, opened(server.url, counts, policy) as store:
        assert gives_nothing(store)
        client = server.client(password="secret")
        client.config_set("requirepass", "")
        client.close()
        until(lambda: store.put(entries(2)) == [True, True])
        assert store.find(keys(2)) == 2


def test_who_may_not_write_still_reads(tmp_path: Path, counts: Counts) -> None:
    lines = ["user reader on nopass ~* +mget +exists", "user writer on nopass ~* +mget +exists +expire +set +unlink"]
    with Server(tmp_path, *lines) as server:
        with opened(server.url.replace("//", "//writer:x@"), counts, PATIENT) as store:
            store.put(entries(2))
        with opened(server.url.replace("//", "//reader:x@"), counts, with_backoff(PATIENT, NEVER)) as store:
            assert store.put(entries(3)) == [False, False, False]
            assert counts[Count.REMOTE_REFUSED] == 3
            assert same(store.get(keys(2), room()), entries(2))
            assert store.up


def test_who_may_only_write_reads_nothing(tmp_path: Path, counts: Counts) -> None:
    with (
        Server(tmp_path, "user writer on nopass ~* +expire +set") as server,
        opened(server.url.replace("//", "//writer:x@"), counts, with_backoff(PATIENT, NEVER)) as store,
    ):
        assert store.put(entries(2)) == [True, True]
        assert store.get(keys(2), room()) == []
        assert not store.up


def test_a_replica_is_read_from_and_refuses_the_rest_without_being_sent_it(tmp_path: Path, counts: Counts) -> None:
    with Server(tmp_path, "appendonly no") as server, opened(server.url, counts, with_backoff(PATIENT, NEVER)) as store:
        store.put(entries(2))
        client = server.client()
        client.replicaof("127.0.0.1", str(free_port()))
        before = client.info("stats")["total_net_input_bytes"]
        assert store.put([(key(7), bytes(1_000_000))]) == [False]
        assert store.put(entries(2)) == [False, False]
        assert client.info("stats")["total_net_input_bytes"] - before < 10_000
        client.close()
        assert same(store.get(keys(2), room()), entries(2))
        assert store.up
    assert counts[Count.REMOTE_REFUSED] == 3
    assert counts[Count.REMOTE_FAILURES] == 0


def test_a_server_that_is_full_keeps_what_it_has_and_is_written_to_again_when_it_is_not(tmp_path: Path, counts: Counts) -> None:
    policy = with_backoff(PATIENT, Backoff(first=0.02, longest=0.05))
    with Server(tmp_path, "maxmemory 8mb", "maxmemory-policy noeviction") as server, opened(server.url, counts, policy) as store:
        stored = entries(30, 500_000)
        kept = [store.put([pair]) == [True] for pair in stored]
        full = kept.index(False)
        assert full > 4
        assert counts[Count.REMOTE_REFUSED] == kept.count(False)
        assert store.find(keys(30)) == full
        assert same(store.get(keys(2), room()), stored[:2])
        assert store.up
        client = server.client()
        client.flushall()
        until(lambda: store.put(stored[20:21]) == [True])
        client.close()


def test_of_entries_that_are_sent_together_only_those_count_that_were_kept(tmp_path: Path, counts: Counts) -> None:
    with Server(tmp_path, "maxmemory 8mb", "maxmemory-policy noeviction") as server:
        store = RemoteStore(server.address, 1_000_096, counts, msgspec.structs.replace(PATIENT, at_once=20 << 20))
        kept = store.put(entries(12, 1_000_000))
        assert kept[0]
        assert not kept[-1]
        assert kept == [store.find([of]) == 1 for of in keys(12)]
        store.close()


def test_a_server_that_is_not_there_costs_nothing(tmp_path: Path, counts: Counts, caplog: pytest.LogCaptureFixture) -> None:
    with opened(f"unix://{tmp_path}/nothing", counts, with_backoff(PATIENT, NEVER)) as store:
        assert store.find(keys(2)) == 0
        assert counts[Count.REMOTE_FAILURES] == 1
        assert not store.up
        for _ in range(100):
            assert gives_nothing(store)
        store.discard(keys(2))
    assert counts[Count.REMOTE_FAILURES] == 1
    assert counts[Count.REMOTE_SKIPPED] == 201
    assert counts[Count.REMOTE_REFUSED] == 200
    assert len(caplog.records) == 1


def test_a_refused_port_and_a_host_that_has_no_address_are_failures(counts: Counts) -> None:
    with opened(f"valkey://127.0.0.1:{free_port()}", counts, PATIENT) as store:
        assert gives_nothing(store)
    with opened("valkey://no-such-host.invalid", counts, PATIENT) as store:
        assert gives_nothing(store)
    assert counts[Count.REMOTE_OPENINGS] == 2


def test_a_server_that_was_started_again_is_used_again(server: Server, counts: Counts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with opened(server.url, counts, with_backoff(PATIENT, Backoff(first=0.02, longest=0.1))) as store:
        store.put(entries(3))
        server.kill()
        assert store.get(keys(3), room()) == []
        assert gives_nothing(store)
        server.start()
        until(lambda: store.up)
        assert store.find(keys(3)) == 0
        assert store.put(entries(3)) == [True] * 3
        assert same(store.get(keys(3), room()), entries(3))
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]


def test_a_server_that_was_replaced_between_two_exchanges_is_noticed_by_nobody(server: Server, counts: Counts) -> None:
    with opened(server.url, counts, PATIENT) as store:
        store.put(entries(3))
        server.kill()
        server.start()
        assert store.put(entries(3)) == [True] * 3
    assert counts[Count.REMOTE_FAILURES] == 0


def test_killed_in_the_middle_of_anything_the_store_ends_in_time_and_comes_back(server: Server, counts: Counts) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    source = random.Random(seed)
    stored = entries(8, 300_000)
    policy = msgspec.structs.replace(HASTY, at_once=1 << 20)
    store = RemoteStore(server.address, 300_096, counts, policy)
    stop = threading.Event()
    longest = [0.0, 0.0]

    def hammer(me: int) -> None:
        space = room(4 << 20)
        while not stop.is_set():
            began = time.monotonic()
            if me == 0:
                store.put(stored)
            else:
                got = store.get(keys(8), space)
                assert same(got, stored[: len(got)])
            longest[me] = max(longest[me], time.monotonic() - began)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        hammering = [pool.submit(hammer, me) for me in range(2)]
        try:
            for _ in range(6):
                before = counts[Count.REMOTE_HITS]
                until(lambda before=before: counts[Count.REMOTE_HITS] > before + 8)
                time.sleep(source.random() * 0.02)
                server.kill()
                server.start()
        finally:
            stop.set()
        for future in hammering:
            future.result(LONG)
    until(lambda: store.up)
    assert store.put(stored) == [True] * 8
    store.close()
    print("longest", longest, counts.read())
    assert max(longest) < 30
    assert counts[Count.REMOTE_OPENINGS] > 0


def test_a_server_that_is_frozen_costs_one_timeout_and_nothing_after_that(server: Server, counts: Counts) -> None:
    with opened(server.url, counts, HASTY) as store:
        assert store.put(entries(3)) == [True] * 3
        server.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert store.get(keys(3), room()) == []
        assert time.monotonic() - began >= 0.5
        assert not store.up
        asked = counts[Count.REMOTE_SKIPPED]
        assert gives_nothing(store)
        assert counts[Count.REMOTE_SKIPPED] == asked + 2
        until(lambda: counts[Count.REMOTE_OPENINGS] >= 3)  # tries go on
        server.signal(signal.SIGCONT)
        until(lambda: store.up)
        assert same(store.get(keys(3), room()), entries(3))


def test_a_frozen_server_takes_no_entry_for_ever(server: Server, counts: Counts) -> None:
    with opened(server.url, counts, HASTY) as store:
        assert store.put(entries(1)) == [True]
        server.signal(signal.SIGSTOP)
        assert store.put([(key(5), bytes(20_000_000))]) == [False]
        assert not store.up
        server.signal(signal.SIGCONT)


def test_a_try_is_made_by_nobody_who_waits(counts: Counts) -> None:
    with Liar(lambda connection: None) as liar, opened(liar.url, counts, HASTY) as store:
        assert store.get(keys(1), room()) == []
        until(lambda: counts[Count.REMOTE_OPENINGS] >= 2)
        asked = counts[Count.REMOTE_FAILURES]
        for _ in range(1000):
            store.get(keys(1), room())
        assert counts[Count.REMOTE_FAILURES] - asked < 20
        assert liar.accepted < 30


NONSENSE = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\0" * 100,
    b"+NO\r\n" * 9,
    b"+OK\r\n" * 9,
    b"$-1\r\n" * 9,
    b":1\r\n" * 9,
    b"*-1\r\n" * 9,
    b"*1\r\n*1\r\n",
    b"*1\r\n:1\r\n" * 9,
    b"*2\r\n:1\r\n+x\r\n" * 9,
    b"*3\r\n$-1\r\n$-1\r\n$-1\r\n" * 9,
    b"",
]


# A number answers EXISTS and EXPIRE.
@pytest.mark.parametrize(
    ("asked", "answer"),
    [(asked, answer) for asked in ("find", "get", "put") for answer in NONSENSE if asked == "get" or answer[:1] != b":"],
)
def test_nonsense_is_a_failure(counts: Counts, asked: str, answer: bytes) -> None:
    def talk(connection: socket.socket) -> None:
        while connection.recv(1 << 16) and answer:
            connection.sendall(answer)

    nothing = {"find": 0, "get": [], "put": [False, False]}
    with Liar(talk) as liar, opened(liar.url, counts, with_backoff(HASTY, NEVER)) as store:
        ask = {"find": lambda: store.find(keys(2)), "get": lambda: store.get(keys(2), room()), "put": lambda: store.put(entries(2))}
        assert ask[asked]() == nothing[asked]
        assert not store.up
    assert counts[Count.REMOTE_FAILURES] == 1


@pytest.mark.parametrize("answer", [b":1\r\n", b"$-1\r\n", b"+QUEUED\r\n", b"*0\r\n"])
def test_only_who_says_ok_has_kept_an_entry(counts: Counts, answer: bytes) -> None:
    def talk(connection: socket.socket) -> None:
        while command := connection.recv(1 << 16):
            connection.sendall(b":0\r\n" if b"EXPIRE" in command else answer)

    with Liar(talk) as liar, opened(liar.url, counts, with_backoff(HASTY, NEVER)) as store:
        assert store.put(entries(1)) == [False]
        assert not store.up


def test_a_value_that_trickles_in_is_given_up_as_a_whole(counts: Counts) -> None:
    def trickle(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"*1\r\n$1000000\r\n")
        while True:
            connection.sendall(b"x" * 100)
            time.sleep(0.05)

    with Liar(trickle) as liar, opened(liar.url, counts, with_backoff(HASTY, NEVER)) as store:
        began = time.monotonic()
        assert store.get(keys(1), room(2 << 20)) == []
        assert time.monotonic() - began < 30
    assert counts[Count.REMOTE_FAILURES] == 1


def test_a_server_that_loads_is_left_alone_until_it_has(counts: Counts) -> None:
    loaded = threading.Event()

    def talk(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            connection.sendall(b"+OK\r\n" if loaded.is_set() else b"-LOADING it loads\r\n")

    policy = RemotePolicy(link=LinkPolicy(connect_timeout=LONG, timeout=LONG, backoff=Backoff(first=0.02, longest=0.02)))
    with Liar(talk) as liar, opened(liar.url, counts, policy) as store:
        assert store.get(keys(1), room()) == []
        until(lambda: counts[Count.REMOTE_OPENINGS] >= 3)
        assert not store.up
        loaded.set()
        until(lambda: store.up)


def test_closing_waits_for_no_timer(counts: Counts) -> None:
    store = RemoteStore(parse_address("valkey://127.0.0.1:1"), ENTRY, counts, with_backoff(PATIENT, NEVER))
    store.find(keys(1))
    assert any(thread.name == "kv-store-try" for thread in threading.enumerate())
    store.close()
    assert not any(thread.name == "kv-store-try" for thread in threading.enumerate())


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost that vouches for itself, and its key."""
    paths = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def relay(server: Server, context: ssl.SSLContext) -> Callable[[socket.socket], None]:
    """What the other end of a TLS connection does: it speaks with the server's socket."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def treat(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as outer, socket.socket(socket.AF_UNIX) as inner:
            inner.connect(server.address.path)
            back = threading.Thread(target=pump, args=(inner, outer))
            back.start()
            pump(outer, inner)
            back.join()

    return treat


@pytest.mark.parametrize(("host", "trusted", "works"), [("localhost", True, True), ("localhost", False, False), ("127.0.0.1", True, False)])
def test_tls_is_spoken_only_with_whom_the_authority_vouches_for(
    server: Server, tmp_path: Path, counts: Counts, host: str, trusted: bool, works: bool
) -> None:
    cert, private = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, private)
    with Liar(relay(server, context)) as liar:
        port = liar.url.rpartition(":")[2]
        url = f"valkeys://{host}:{port}" + (f"?ca={cert}" if trusted else "")
        with opened(url, counts, with_backoff(PATIENT, NEVER)) as store:
            stored = entries(3, 200_000)
            assert store.put(stored) == [works] * 3
            assert same(store.get(keys(3), room()), stored if works else [])
    assert (counts[Count.REMOTE_FAILURES] == 0) is works
