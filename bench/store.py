"""How fast blocks go into the KV store and come out of it, beside what copying them or sending them plainly takes.

    python bench/store.py [--sizes 100000,500000,2000000] [--folder FOLDER] [--json]

Needs the extra `store`. One block at a time is for the latency, eight megabytes of blocks at a time for the rate; medians. `find` asks
about all of these. The floor of a server's rows is the same bytes over the same kind of socket to a process that does nothing else, that
of the others is a copy in memory. `client package` is the same server, read by the client package's own parser. FOLDER is where the disk
tier's files go (they are in the page cache when they are read; default: the system's folder for temporary files).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import valkey

from tokenmill.transfer.store.address import parse_address
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.disk import DiskStore
from tokenmill.transfer.store.embedded import EmbeddedPolicy, EmbeddedServer
from tokenmill.transfer.store.entry import Label, Scope, pack, unpack
from tokenmill.transfer.store.link import LinkPolicy
from tokenmill.transfer.store.remote import PREFIX, RemotePolicy, RemoteStore
from tokenmill.transfer.store.tiers import Store

AT_ONCE = 8_000_000
ROUNDS = 30
MEMORY = 1 << 30
PATIENT = RemotePolicy(link=LinkPolicy(timeout=60.0))
"""A busy machine is to be slow, not to fail."""


@dataclass(frozen=True)
class Row:
    """block: bytes. one: seconds for one block, or one question. rate, floor: bytes per second, of many at once and at best."""

    what: str
    block: int
    one: float
    rate: float | None = None
    floor: float | None = None

    def render(self) -> str:
        cells = f"{self.what:<24} {self.block / 1e3:8.0f} {1e6 * self.one:10.0f}"
        if self.rate is None or self.floor is None:
            return cells
        return f"{cells} {self.rate / 1e9:8.2f} {self.floor / 1e9:8.2f} {self.rate / self.floor:7.2f}"


HEADING = f"{'':<24} {'block KB':>8} {'one us':>10} {'GB/s':>8} {'floor':>8} {'ratio':>7}"


def seconds(work: Callable[[], object]) -> float:
    """Median time of one call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Blocks:
    """As many blocks of one size as are put and got at once, and room for them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.many = max(1, AT_ONCE // size)
        self.payload = random.Random(size).randbytes(size)
        self.labels = [Label(Scope.of("bench"), number.to_bytes(16, "big")) for number in range(self.many)]
        self.keys = [label.key for label in self.labels]
        self.entries = [(label.key, pack(label, self.payload)) for label in self.labels]
        self.room = memoryview(bytearray(self.many * len(self.entries[0][1])))

    def rate(self, took: float) -> float:
        return self.many * self.size / took


def copying(blocks: Blocks) -> float:
    """Bytes per second of a copy in memory."""
    source = bytes(len(blocks.room))

    def copy() -> None:
        blocks.room[:] = source

    return blocks.rate(seconds(copy))


def enveloping(blocks: Blocks, floor: float) -> Iterator[Row]:
    label, memory = blocks.labels[0], blocks.entries[0][1]
    for what, work in (("pack", lambda: pack(label, blocks.payload)), ("check and unpack", lambda: unpack(label, memory))):
        took = seconds(work)
        yield Row(what, blocks.size, took, blocks.size / took, floor)


def _answer(listener: socket.socket) -> None:
    """The other side of `plainly`: takes so many bytes, then gives so many, as eight-byte numbers before them say."""
    connection, _ = listener.accept()
    memory = memoryview(bytearray(AT_ONCE + 4_000_000))
    with connection:
        while head := connection.recv(16, socket.MSG_WAITALL):
            taking, giving = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
            _fill(connection, memory[:taking])
            connection.sendall(memory[:giving])


def _fill(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        memory = memory[connection.recv_into(memory) :]


@contextmanager
def plainly(kind: str) -> Iterator[Callable[[int, memoryview], None]]:
    """Something that sends and then receives as many bytes as it is told, over a plain socket to another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        if kind == "unix":
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen()
        else:
            listener = socket.create_server(("127.0.0.1", 0))
        peer = multiprocessing.get_context("fork").Process(target=_answer, args=(listener,), daemon=True)
        peer.start()
        with listener, socket.socket(listener.family) as connection:
            connection.connect(listener.getsockname())
            if kind == "tcp":
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            source = bytes(AT_ONCE + 4_000_000)

            def exchange(sent: int, into: memoryview) -> None:
                connection.sendall(sent.to_bytes(8, "big") + len(into).to_bytes(8, "big"))
                connection.sendall(source[:sent] if sent < len(source) else source)
                _fill(connection, into)

            yield exchange
        peer.join()


def floors(kind: str, blocks: Blocks) -> tuple[float, float]:
    """Bytes per second sent and received plainly."""
    one = blocks.room[:1]
    with plainly(kind) as exchange:
        sending = seconds(lambda: exchange(len(blocks.room), one))
        receiving = seconds(lambda: exchange(1, blocks.room))
    return blocks.rate(sending), blocks.rate(receiving)


def storing(what: str, store: Store, blocks: Blocks, put_floor: float, get_floor: float) -> Iterator[Row]:
    """Put and get. What was put is discarded before it is put again, which is not timed."""

    def put(count: int) -> float:
        store.discard(blocks.keys)
        start = time.perf_counter()
        kept = store.put(blocks.entries[:count])
        took = time.perf_counter() - start
        assert all(kept), "the store did not keep a block"
        return took

    def get(count: int) -> float:
        start = time.perf_counter()
        got = store.get(blocks.keys[:count], blocks.room)
        took = time.perf_counter() - start
        assert len(got) == count, "the store did not give a block"
        return took

    for name, work, floor in (("put", put, put_floor), ("get", get, get_floor)):
        one, many = (statistics.median(work(count) for _ in range(ROUNDS)) for count in (1, blocks.many))
        yield Row(f"{what} {name}", blocks.size, one, blocks.rate(many), floor)
    yield Row(f"{what} find {blocks.many}", blocks.size, seconds(lambda: store.find(blocks.keys)))


def by_package(server: EmbeddedServer, blocks: Blocks, floor: float) -> Row:
    """Getting what `storing` has left, as the client package does it."""
    address = parse_address(server.url)
    client: Any = valkey.Valkey(unix_socket_path=address.path, password=address.password)
    names = [PREFIX + key.hex().encode() for key in blocks.keys]
    one, many = seconds(lambda: client.mget(names[:1])), seconds(lambda: client.mget(names))
    client.close()
    return Row("client package get", blocks.size, one, blocks.rate(many), floor)


def measure(sizes: list[int], folder: Path) -> Iterator[Row]:
    for size in sizes:
        blocks = Blocks(size)
        copied = copying(blocks)
        yield from enveloping(blocks, copied)
        sent = {kind: floors(kind, blocks) for kind in ("unix", "tcp")}
        counts = Counts()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with EmbeddedServer.started(EmbeddedPolicy(memory=MEMORY, port=port)) as server:
            for kind, url in (("unix", server.url), ("tcp", server.tcp_url)):
                store = RemoteStore(parse_address(url), len(blocks.entries[0][1]), counts, PATIENT)
                yield from storing(kind, store, blocks, *sent[kind])
                store.close()
            yield by_package(server, blocks, sent["unix"][1])
        with tempfile.TemporaryDirectory(dir=folder) as own:
            yield from storing("disk", DiskStore(Path(own), counts), blocks, copied, copied)
        assert not counts[Count.REMOTE_FAILURES] + counts[Count.DISK_FAILURES] + counts[Count.DISK_FLAWED], counts.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100000,500000,2000000", help="bytes of a block, with commas")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = measure([int(size) for size in options.sizes.split(",")], options.folder)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return
    print(HEADING)
    for row in rows:
        print(row.render(), flush=True)


if __name__ == "__main__":
    main()
