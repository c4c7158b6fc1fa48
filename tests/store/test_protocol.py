from __future__ import annotations

import concurrent.futures
import contextlib
import random
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from valkey.connection import PythonRespSerializer
from valkey.exceptions import ConnectionError as LostConnection
from valkey.exceptions import InvalidResponse

from tokenmill.transfer.store.protocol import CommandPacker, Refusal, ReplyReader, Room

BUFFER = 64


class Peer:
    """The reader under test at one end of a socket pair, and the test at the other."""

    def __init__(self, timeout: float = 60.0) -> None:
        ours, self.socket = socket.socketpair()
        ours.settimeout(timeout)
        self.room = Room()
        self.reader = ReplyReader(BUFFER, self.room)
        self.connection: Any = SimpleNamespace(_sock=ours, socket_timeout=timeout)
        self.reader.on_connect(self.connection)

    def answers(self, data: bytes, count: int, piece: int = 1 << 30) -> list[Any]:
        """What the reader makes of `data`, which comes in pieces of so many bytes."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            sending = pool.submit(lambda: [self.socket.sendall(data[at : at + piece]) for at in range(0, len(data), piece)])
            got = [self.reader.read_response() for _ in range(count)]
            sending.result()
        return got

    def close(self) -> None:
        self.socket.close()
        self.connection._sock.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.mark.parametrize("piece", [1, 2, 5, 61, 1 << 30])
def test_answers_in_pieces_of_any_size_are_the_same(peer: Peer, piece: int) -> None:
    long = bytes(range(256)) * 20
    peer.room.free = memoryview(bytearray(10_000))
    stream = b"+OK\r\n:42\r\n:-1\r\n$-1\r\n$0\r\n\r\n$5\r\na\r\nbc\r\n*-1\r\n*0\r\n*3\r\n$-1\r\n$5120\r\n"
    stream += long + b"\r\n:7\r\n-OOM no memory\r\n"
    got = peer.answers(stream, 10, piece)
    refusal = got.pop()
    assert got == [b"OK", 42, -1, None, b"", b"a\r\nbc", None, [], [None, long, 7]]
    assert isinstance(refusal, Refusal)
    assert (refusal.code, str(refusal)) == ("OOM", "OOM no memory")


def test_values_lie_one_after_the_other_where_there_is_room(peer: Peer) -> None:
    memory = bytearray(8)
    peer.room.free = memoryview(memory)
    (values,) = peer.answers(b"*3\r\n$3\r\nabc\r\n$2\r\nde\r\n$3\r\nfgh\r\n", 1)
    assert memory == b"abcdefgh"
    assert values == [b"abc", b"de", b"fgh"]
    memory[0] = ord("z")
    assert values[0] == b"zbc"


def test_a_value_without_room_is_passed_over_and_the_next_answer_is_read(peer: Peer) -> None:
    peer.room.free = memoryview(bytearray(4))
    stream = b"*3\r\n$3\r\nabc\r\n$1000\r\n" + bytes(1000) + b"\r\n$1\r\nd\r\n+OK\r\n"
    assert peer.answers(stream, 2) == [[b"abc", b"", b"d"], b"OK"]


def test_each_thread_has_its_own_room(peer: Peer) -> None:
    peer.room.free = memoryview(bytearray(4))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: len(peer.room.free)).result() == 0


@pytest.mark.parametrize(
    "data", [b"?1\r\n", b"\r\n", b"$x\r\n", b":\r\n", b"*1\r\n*1\r\n+a\r\n", b"*65537\r\n", b"+" + bytes(BUFFER), b"HTTP/1.1 200 OK\r\n"]
)
def test_what_no_server_says_is_refused(peer: Peer, data: bytes) -> None:
    peer.socket.sendall(data)
    with pytest.raises(InvalidResponse):
        peer.reader.read_response()


@pytest.mark.parametrize("data", [b"", b"+O", b"$5\r\nab", b"$5\r\nabcde", b"*2\r\n:1\r\n"])
def test_an_end_within_an_answer_is_a_lost_connection(peer: Peer, data: bytes) -> None:
    peer.room.free = memoryview(bytearray(5))
    peer.socket.sendall(data)
    peer.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(LostConnection):
        peer.reader.read_response()


@pytest.mark.parametrize("value", [b"$100000\r\n", b"*3\r\n$100000\r\n"])
def test_an_answer_that_trickles_in_has_one_timeout_as_a_whole(value: bytes) -> None:
    peer = Peer(timeout=0.3)
    peer.room.free = memoryview(bytearray(50_000 if value.startswith(b"$") else 200_000))

    def trickle() -> None:
        peer.socket.sendall(value)
        with contextlib.suppress(OSError):  # until the reader has left
            while True:
                peer.socket.sendall(b"x")
                time.sleep(0.02)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        trickling = pool.submit(trickle)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            peer.reader.read_response()
        taken = time.monotonic() - began
        peer.close()
        trickling.result()
    assert 0.3 <= taken < 30


def test_an_answer_that_never_ends_has_one_timeout_however_fast_it_comes() -> None:
    peer = Peer(timeout=0.3)
    piece = bytes(1 << 20)

    def pour() -> None:
        peer.socket.sendall(b"$3000000000\r\n")
        with contextlib.suppress(OSError):
            for _ in range(3000):
                peer.socket.sendall(piece)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pouring = pool.submit(pour)
        try:
            with pytest.raises(TimeoutError):
                peer.reader.read_response()
        finally:
            peer.close()
        pouring.result()


def test_whether_something_is_there_is_known_at_once(peer: Peer) -> None:
    assert not peer.reader.can_read(0)
    peer.socket.sendall(b"+OK\r\n+")
    assert peer.reader.can_read(0)
    assert peer.reader.read_response() == b"OK"
    assert peer.reader.can_read(0)
    peer.socket.sendall(b"OK\r\n")
    assert peer.reader.read_response() == b"OK"
    assert not peer.reader.can_read(0)
    assert peer.connection._sock.gettimeout() == 60.0
    peer.socket.close()
    with pytest.raises(LostConnection):
        peer.reader.can_read(0)


def test_a_reader_without_a_connection_says_so(peer: Peer) -> None:
    peer.reader.on_disconnect()
    with pytest.raises(LostConnection):
        peer.reader.read_response()


def test_what_was_left_unread_is_gone_after_a_new_connection(peer: Peer) -> None:
    peer.socket.sendall(b"+OK\r\n+late\r\n")
    assert peer.reader.read_response() == b"OK"
    fresh = Peer()
    peer.reader.on_connect(fresh.connection)
    fresh.socket.sendall(b"+new\r\n")
    assert peer.reader.read_response() == b"new"
    fresh.close()


def test_commands_are_packed_as_by_the_client_package() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    source = random.Random(seed)
    theirs = PythonRespSerializer(6000, lambda value: value if isinstance(value, bytes | memoryview) else str(value).encode())
    for _ in range(200):
        sizes = [source.choice((0, 3, 5000, 9000)) for _ in range(4)]
        arguments = [source.randrange(10**6), "text", *map(source.randbytes, sizes)]
        source.shuffle(arguments)
        command = ["SET", *arguments]
        assert b"".join(CommandPacker().pack(*command)) == b"".join(theirs.pack(*command))


def test_long_arguments_are_sent_from_where_they_are() -> None:
    entry = memoryview(bytearray(100_000))
    assert any(piece is entry for piece in CommandPacker().pack("SET", b"key", entry))
