"""What strangers can do to a door, and what it costs to serve: raw sockets against a door in this process."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import tracemalloc
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from fake_pools import THEIRS, draw, pool, random_bytes, stream
from fake_workers import FINGERPRINT, SECRET, Wire, over

from tokenmill.core.errors import ConfigError
from tokenmill.core.proof import prove
from tokenmill.kernels.frames import BLOCK, Geometry, KVMemory
from tokenmill.transfer import listener, names
from tokenmill.transfer.connector import Options, Side
from tokenmill.transfer.messages import ANSWERS, CHALLENGES, GREETINGS, VERSION, Granted, Hello, Read, Refusal, Welcome
from tokenmill.transfer.stream import MAX_MESSAGE, Stream

NONCE = bytes(range(16))
COUNTS = [40, 13, 22]


@pytest.fixture
def rng():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def side():
    return Side(pool(THEIRS, random_bytes(THEIRS, 5)), "door's boot", FINGERPRINT)


@pytest.fixture
def open_door(wire, side):
    doors = []

    def start(**options):
        doors.append(names.open_door(wire.connector, side, replace(wire.door_options(), **options)))
        return doors[-1]

    yield start
    for door in doors:
        door.close()


@pytest.fixture
def knock(wire):
    """knock(door): a raw connection."""
    sockets = []

    def connect(door):
        place = door.address.partition(":")[2]
        if wire.connector == "shm":
            sock = socket.socket(socket.AF_UNIX)
            sock.connect("\0" + place[1:] if place.startswith("@") else place)
        else:
            sock = socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])))
        sockets.append(sock)
        return sock

    yield connect
    for sock in sockets:
        sock.close()


def at_the_end(sock):
    """Wait for the other side to close it, whatever it has said before."""
    sock.settimeout(600)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def reads(us, door, boot="door's boot"):
    some = [np.arange(3, dtype=np.int32)] * 3
    door.grant(NONCE, some)
    return us.reader.read(door.address, boot, NONCE, some, some, us.expected).outcome


@pytest.fixture
def us(make_us, side):
    us = make_us()
    us.expected = side.memory.frames([np.arange(3, dtype=np.int32)] * 3).digest()
    return us


def test_garbage_ends_its_own_connection_and_nothing_else(rng, wire, open_door, knock, us):
    door = open_door()
    assert reads(us, door) == "ok"
    messages = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\0\0\0\0", b"\0\0\0\1\xc1", b"\0\0\x10\1" + bytes(4097)]
    messages += [
        msgspec.msgpack.encode(value) for value in ({}, {"version": "x"}, {"version": 1}, [1] * 1000, {"version": 1, "fresh": bytes(31)})
    ]
    messages += [rng.integers(0, 256, rng.integers(1, 300), np.uint8).tobytes() for _ in range(30)]
    for message in messages:
        for head in (b"", len(message).to_bytes(4, "big")):
            sock = knock(door)
            with contextlib.suppress(OSError):  # it may be closed before all is said
                sock.sendall(head + message)
                sock.shutdown(socket.SHUT_WR)
            assert at_the_end(sock)
    assert reads(us, door) == "ok"


def introduce(sock, secret=SECRET, **wrong):
    """A reader's part of the handshake, as wrong as it is asked to be; the stream, and what the door says to it."""
    stream = Stream(sock, 600)
    challenge = stream.receive(CHALLENGES)
    said = {"version": VERSION, "fresh": bytes(32), "fingerprint": FINGERPRINT, "slots": THEIRS.slots, "piece_bytes": THEIRS.piece_bytes}
    hello = Hello(**said | wrong)
    proof = wrong.get("proof", prove(secret, "reader", challenge.fresh, hello))
    stream.send(msgspec.structs.replace(hello, proof=proof))
    return stream, stream.receive(GREETINGS)


@over("shm", "tcp")
def test_who_is_not_ours_is_told_why(wire, open_door, knock):
    door = open_door()
    right = wire.secret
    cases = [
        ({"version": VERSION + 1}, right, "version"),
        ({"version": 0}, right, "version"),
        ({}, b"another secret that is long enough", "secret"),
        ({"proof": b""}, right, "secret"),
        ({"proof": bytes(32)}, right, "secret"),
        ({"fingerprint": "e" * 64}, right, "fingerprint"),
        ({"fingerprint": ""}, right, "fingerprint"),
        ({"slots": ()}, right, "geometry"),
        ({"slots": (7, 3)}, right, "geometry"),
        ({"piece_bytes": 0}, right, "geometry"),
    ]
    for wrong, secret, reason in cases:
        sock = knock(door)
        _, answer = introduce(sock, secret, **wrong)
        assert isinstance(answer, Refusal), wrong
        assert answer.reason == reason
        assert SECRET.decode() not in answer.detail
        assert at_the_end(sock)


@over("shm", "tcp")
def test_a_proof_that_was_overheard_is_none_the_next_time(wire, open_door, knock):
    door = open_door()
    secret = wire.secret
    sock = Stream(knock(door), 600)
    challenge = sock.receive(CHALLENGES)
    hello = Hello(version=VERSION, fresh=bytes(32), fingerprint=FINGERPRINT, slots=THEIRS.slots, piece_bytes=THEIRS.piece_bytes)
    hello = msgspec.structs.replace(hello, proof=prove(secret, "reader", challenge.fresh, hello))
    sock.send(hello)
    assert isinstance(sock.receive(GREETINGS), Welcome)
    other = Stream(knock(door), 600)
    other.receive(CHALLENGES)
    other.send(hello)
    assert other.receive(GREETINGS).reason == "secret"


@over("shm", "tcp")
def test_a_door_does_not_prove_what_a_reader_has_to(wire, open_door, knock):
    """What the door says back to a number that a stranger has from another door is no reader's proof there."""
    hello = Hello(version=VERSION, fresh=bytes(32), fingerprint=FINGERPRINT, slots=THEIRS.slots, piece_bytes=THEIRS.piece_bytes)
    assert prove(SECRET, "reader", bytes(32), hello) != prove(SECRET, "door", bytes(32), hello)


@over("shm", "tcp")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode({"nonce": bytes(15), "frames": []}),
        msgspec.msgpack.encode({"nonce": bytes(16), "frames": [1]}),
    ],
)
def test_a_reader_that_asks_for_nonsense_is_cut_off(wire, open_door, knock, us, body):
    door = open_door()
    sock = knock(door)
    introduce(sock, wire.secret)
    sock.sendall(len(body).to_bytes(4, "big") + body)
    assert at_the_end(sock)
    assert reads(us, door) == "ok"


@over("shm", "tcp")
def test_frames_that_are_no_numbers_are_refused(wire, open_door, knock):
    door = open_door()
    door.grant(NONCE, [np.arange(5, dtype=np.int32)] * 3)
    sock = knock(door)
    stream, _ = introduce(sock, wire.secret)
    if wire.connector == "shm":
        socket.recv_fds(sock, 1, 0)
    for frames in ((b"123", b"", b""), (b"", b""), (b"",) * 4, (b"\xff" * 4, b"", b"")):
        stream.send(Read(NONCE, frames))
        answer = stream.receive(ANSWERS)
        assert (type(answer), answer.reason) == (Refusal, "frames")
    stream.send(Read(NONCE, (bytes(4), b"", b"")))
    assert isinstance(stream.receive(ANSWERS), Granted)


@over("shm", "tcp")
def test_a_message_that_is_too_long_is_not_even_read(wire, open_door, knock):
    sock = knock(open_door())
    introduce(sock, wire.secret)
    sock.sendall((MAX_MESSAGE + 1).to_bytes(4, "big"))
    assert at_the_end(sock)


def test_who_says_nothing_has_to_go(open_door, knock):
    """Before the handshake; a reader that is known may be silent."""
    sock = knock(open_door(timeout=0.1))
    assert at_the_end(sock)


def test_strangers_do_not_keep_a_reader_out(open_door, knock, us):
    """Half-open connections, more than there is room for; the oldest go."""
    door = open_door()
    assert reads(us, door) == "ok"
    link = us.reader._places[door.address].link
    strangers = [knock(door) for _ in range(listener.MAX_SESSIONS + 10)]
    assert all(at_the_end(sock) for sock in strangers[:10])
    us.reader._places[door.address].drop()
    assert reads(us, door) == "ok"
    for sock in strangers:
        sock.close()
    assert reads(us, door) == "ok"
    assert us.reader._places[door.address].link is not link


class Watched(dict):
    """Tells when something is taken out."""

    def __init__(self, content, gone):
        super().__init__(content)
        self.gone = gone

    def pop(self, *which):
        found = super().pop(*which)
        self.gone.set()
        return found


@over("shm", "tcp")
def test_no_more_readers_than_there_is_room_for(wire, open_door, knock, monkeypatch):
    monkeypatch.setattr(listener, "MAX_SESSIONS", 3)
    door = open_door()
    secret = wire.secret
    known = [introduce(knock(door), secret) for _ in range(3)]
    assert all(isinstance(answer, Welcome) for _, answer in known)
    assert at_the_end(knock(door))
    ended = threading.Event()
    monkeypatch.setattr(door._listener, "_sessions", Watched(door._listener._sessions, ended))
    known[1][0].close()
    ended.wait()
    assert isinstance(introduce(knock(door), secret)[1], Welcome)


def test_a_closed_door_ends_its_sessions_and_leaves_no_thread(wire, open_door, knock, us):
    before = threading.active_count()
    door = open_door()
    assert reads(us, door) == "ok"
    stranger = knock(door)
    door.close()
    door.close()
    assert threading.active_count() == before
    assert at_the_end(stranger)
    assert reads(us, door) == "lost"


def test_what_is_not_in_the_pool_cannot_be_granted(open_door):
    door = open_door()
    with pytest.raises(ValueError, match=f"frame {THEIRS.n_frames} is not in a pool of {THEIRS.n_frames}"):
        door.grant(NONCE, [np.array([THEIRS.n_frames], np.int32)] * 3)
    door.revoke(NONCE)


def test_memory_does_not_grow_with_what_is_read(make_us):
    """A read of 48 MB by tcp, both sides in this process, takes a few blocks."""
    large = Geometry((3,), 16 << 20, 4096, 4096)
    wire = Wire("tcp")
    memory = pool(large, np.zeros(large.nbytes, np.uint8))
    everything = [np.arange(large.n_frames, dtype=np.int32)]
    with_door = names.open_door("tcp", Side(memory, "boot", FINGERPRINT), wire.door_options())
    ours = names.open_reader(Side(pool(large, np.ones(large.nbytes, np.uint8)), "ours", FINGERPRINT), wire.reader_options())
    with_door.grant(NONCE, everything)
    checksum = memory.frames(everything).digest()
    tracemalloc.start()
    try:
        assert ours.read(with_door.address, "boot", NONCE, everything, everything, checksum).outcome == "ok"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        ours.close()
        with_door.close()
    assert peak < 8 * BLOCK


def test_tcp_needs_a_secret_and_an_address_for_others(side):
    for options in (Options(), Options(secret=b"short"), Options(secret=SECRET[:15])):
        with pytest.raises(ConfigError, match="must have at least 16"):
            names.open_door("tcp", side, options)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ConfigError, match="no address for others"):
            names.open_door("tcp", side, Options(secret=SECRET, host=host))
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(ConfigError, match="cannot be opened at"):
            names.open_door("tcp", side, Options(secret=SECRET, host=host))
    door = names.open_door("tcp", side, Options(secret=SECRET))
    with pytest.raises(ConfigError, match="cannot be opened at"):
        names.open_door("tcp", side, Options(secret=SECRET, port=int(door.address.rpartition(":")[2])))
    door.close()


@pytest.mark.parametrize(
    ("host", "advertise", "address"),
    [
        ("::1", None, "tcp:[::1]:"),
        ("::", "127.0.0.1", "tcp:127.0.0.1:"),
        ("::", "::1", "tcp:[::1]:"),
        ("0.0.0.0", "localhost", "tcp:localhost:"),
    ],
)
def test_both_kinds_of_addresses_are_reached(side, host, advertise, address):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    options = Options(secret=SECRET, host=host, advertise=advertise, timeout=600)
    door = names.open_door("tcp", side, options)
    ours = names.open_reader(Side(pool(THEIRS, random_bytes(THEIRS, 6)), "ours", FINGERPRINT), options)
    some = [np.arange(3, dtype=np.int32)] * 3
    door.grant(NONCE, some)
    assert door.address.startswith(address)
    assert ours.read(door.address, "door's boot", NONCE, some, some, side.memory.frames(some).digest()).outcome == "ok"
    ours.close()
    door.close()


def test_shm_needs_a_pool_that_can_be_mapped():
    private = KVMemory(np.zeros(THEIRS.nbytes, np.uint8), THEIRS)
    with pytest.raises(ConfigError, match="shared=True"):
        names.open_door("shm", Side(private, "boot", FINGERPRINT), Options())


def test_a_path_is_taken_from_the_dead_only(side, tmp_path):
    options = Options(socket_path=str(tmp_path / "door"))
    door = names.open_door("shm", side, options)
    with pytest.raises(ConfigError, match="in use"):
        names.open_door("shm", side, options)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match="in use"):
        names.open_door("shm", side, replace(options, socket_path=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(ConfigError, match="cannot be opened"):
        names.open_door("shm", side, replace(options, socket_path=str(tmp_path / "none" / "door")))
    door.close()
    names.open_door("shm", side, options).close()


def test_a_reader_without_tls_or_with_another_authority_is_none(certificate, side):
    if certificate is None:
        pytest.skip("needs openssl, to make a certificate")
    wire = Wire("tcp", certificate)
    door = names.open_door("tcp", side, wire.door_options())
    some = [np.arange(3, dtype=np.int32)] * 3
    door.grant(NONCE, some)
    for tls in (None, ssl.create_default_context()):
        ours = names.open_reader(
            Side(pool(THEIRS, random_bytes(THEIRS, 6)), "ours", FINGERPRINT), replace(wire.reader_options(), reader_tls=tls, timeout=0.5)
        )
        status = ours.read(door.address, "door's boot", NONCE, some, some, bytes(8))
        assert status.outcome == "lost"
        ours.close()
    door.close()


def test_a_reader_of_another_user_is_sent_away(side, monkeypatch, make_us, request):
    """Looked at by the door, which does not even say why."""
    door = names.open_door("shm", side, Options(timeout=600))
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + door.address.removeprefix("shm:@"))
    assert sock.recv(1) == b""
    sock.close()
    door.close()


def test_frames_of_a_reader_are_those_of_the_pool(rng, side):
    """The stream by its definition, step by step."""
    numbers = draw(rng, THEIRS, COUNTS)
    np.testing.assert_array_equal(side.memory.frames(numbers).gather(), stream(side.memory.data, THEIRS, numbers))
