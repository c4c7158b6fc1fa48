"""Doors that are none, or not of ours: whatever they say, a read of them ends and says why."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import threading

import msgspec
import numpy as np
import pytest
from fake_pools import MINE
from fake_workers import over

from tokenmill.core.proof import prove
from tokenmill.transfer import handshake
from tokenmill.transfer.connector import Refused
from tokenmill.transfer.messages import HELLOS, READS, VERSION, Challenge, Granted, Welcome
from tokenmill.transfer.stream import Stream

NONCE = bytes(range(16))


@pytest.fixture
def false_door(wire):
    """false_door(serve): calls serve(stream) for each connection; returns the address."""
    listening, threads = [], []

    def start(serve):
        place = f"@false-{secrets.token_hex(8)}"
        if wire.connector == "shm":
            sock = socket.socket(socket.AF_UNIX)
            sock.bind("\0" + place[1:])
            sock.listen()
        else:
            sock = socket.create_server(("127.0.0.1", 0))
            place = f"127.0.0.1:{sock.getsockname()[1]}"
        listening.append(sock)

        def run():
            while True:
                try:
                    connection, _ = sock.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError, Refused):
                    serve(Stream(connection, 600))

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return f"{wire.connector}:{place}"

    yield start
    for sock in listening:
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    for thread in threads:
        thread.join()


def read_one(us, address, boot="boot", theirs=0):
    one = [np.zeros(1, np.int32)] * 3
    status = us.reader.read(address, boot, NONCE, [part + np.int32(theirs) for part in one], one, bytes(8))
    return status.outcome, status.reason


@over("shm", "tcp")
@pytest.mark.parametrize(
    "words",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\0", b"\0\0\0\1\xc1", b"\0\0\0\1\x80", b"\xff" * 4096, b"\0\0\x10\1" + bytes(4097)],
    ids=["http", "nothing", "no value", "no version", "too long", "a byte too long"],
)
def test_a_door_that_speaks_something_else_is_lost(false_door, us, words):
    assert read_one(us, false_door(lambda stream: stream.send_bytes(words))) == ("lost", "garbled")


@over("shm", "tcp")
def test_a_door_that_closes_at_once_is_lost(false_door, us):
    assert read_one(us, false_door(lambda stream: None)) == ("lost", "ended")


@over("shm", "tcp")
def test_a_door_that_says_nothing_is_lost_in_time(false_door, make_us):
    us, done = make_us(timeout=0.1), threading.Event()
    address = false_door(lambda stream: done.wait())
    try:
        assert read_one(us, address) == ("lost", "silent")
    finally:
        done.set()


@over("shm", "tcp")
def test_a_door_that_drips_is_lost_in_time(false_door, make_us):
    """A byte now and then is no progress."""
    us, gone = make_us(timeout=0.3), threading.Event()

    def drip(stream):
        stream.send_bytes(b"\0\0\1\0")
        while not gone.wait(0.02):
            stream.send_bytes(b"\0")

    try:
        assert read_one(us, false_door(drip)) == ("lost", "silent")
    finally:
        gone.set()


@over("shm", "tcp")
def test_a_door_of_another_version_is_refused(false_door, us):
    def serve(stream):
        stream.send({"version": VERSION + 1, "something": "new"})
        stream.receive_message(4096)

    assert read_one(us, false_door(serve)) == ("refused", "version")


def welcome(stream, side, secret, **wrong):
    """A door's part of the handshake that looks at nothing."""
    stream.send(Challenge(version=VERSION, fresh=bytes(32)))
    hello = stream.receive(HELLOS)
    g = side.memory.geometry
    said = {"slots": g.slots, "slot_stride": g.slot_stride, "piece_bytes": g.piece_bytes, "n_frames": g.n_frames}
    said = Welcome(**{"boot": side.boot, "fingerprint": side.fingerprint} | said | wrong)
    stream.send(msgspec.structs.replace(said, proof=prove(secret, "door", hello.fresh, said)))


@over("shm", "tcp")
def test_a_door_that_does_not_know_the_secret_is_refused(wire, false_door, us):
    """One that looks at ours, and one that would take anybody."""
    wrong = b"another secret that is long enough"
    for serve in (handshake.receive_reader, welcome):
        assert read_one(us, false_door(lambda stream, serve=serve: serve(stream, us.side, wrong))) == ("refused", "secret")


@over("shm", "tcp")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [({"fingerprint": "e" * 64}, "fingerprint"), ({"slots": (7, 3)}, "geometry"), ({"piece_bytes": 48}, "geometry")],
)
def test_a_door_that_looks_at_nothing_is_still_refused_if_it_is_of_another_model(wire, false_door, us, wrong, reason):
    address = false_door(lambda stream: welcome(stream, us.side, wire.secret, **wrong))
    assert read_one(us, address) == ("refused", reason)


@pytest.fixture
def after_welcome(wire, false_door, us):
    """after_welcome(serve, **wrong): the same door, which goes on as `serve(stream)` does; what a read of it gives."""

    def run(serve):
        def all_of_it(stream):
            welcome(stream, us.side, wire.secret)
            stream.receive(READS)
            serve(stream)

        return read_one(us, false_door(all_of_it), us.side.boot)

    return run


ONE = 52 * sum(MINE.slots)


@over("tcp")
def test_frames_come_in_blocks_as_the_door_likes(after_welcome):
    def serve(stream):
        stream.send(Granted())
        for count in (1, ONE - 3, 2):
            stream.send_bytes(count.to_bytes(4, "big") + bytes(count))

    assert after_welcome(serve) == ("corrupt", "checksum")  # all has come, and is not what was meant


@over("tcp")
@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ((ONE + 1).to_bytes(4, "big") + bytes(ONE + 1), "garbled"),
        ((2**32 - 1).to_bytes(4, "big"), "garbled"),
        (bytes(4) + b"\0\0\0\1\x01", "garbled"),
        (ONE.to_bytes(4, "big") + bytes(ONE - 1), "ended"),
        (b"", "ended"),
        (bytes(4), "ended"),
    ],
    ids=["a byte too many", "no block at all", "no refusal", "a byte too few", "nothing", "no end"],
)
def test_blocks_that_cannot_be_end_the_read(after_welcome, sent, reason):
    def serve(stream):
        stream.send(Granted())
        stream.send_bytes(sent)

    assert after_welcome(serve) == ("lost", reason)


@over("tcp")
def test_a_link_on_which_nobody_knows_what_comes_next_is_not_used_again(wire, false_door, us):
    """The door goes on sending blocks, which would be taken for those of another read."""
    links = []

    def serve(stream):
        links.append(stream)
        welcome(stream, us.side, wire.secret)
        while True:
            stream.receive(READS)
            stream.send(Granted())
            stream.send_bytes((2**32 - 1).to_bytes(4, "big"))

    address = false_door(serve)
    for reads in (1, 2):
        assert read_one(us, address, us.side.boot) == ("lost", "garbled")
        assert us.reader._places == {} or us.reader._places[address].link is None
        assert len(links) == reads


@over("tcp")
def test_reasons_that_nobody_knows_are_no_answer(after_welcome):
    assert after_welcome(lambda stream: stream.send({"type": "Refusal", "reason": "mood", "detail": ""})) == ("lost", "garbled")


@pytest.fixture
def hand_over(wire, false_door, us):
    """hand_over(descriptors, **wrong): what a read of a door gives that hands them over."""

    def run(descriptors, theirs=0, **wrong):
        def serve(stream):
            welcome(stream, us.side, b"", **wrong)
            socket.send_fds(stream.sock, [b"\0"], descriptors)
            stream.receive(READS)
            stream.send(Granted())
            stream.receive(READS)

        before = len(os.listdir("/proc/self/fd"))
        result = read_one(us, false_door(serve), us.side.boot, theirs)
        for place in us.reader._places.values():
            place.drop()
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # the false door's socket and the connection that it may still have
        return result

    return run


def sealed(size, seals):
    descriptor = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@over("shm")
def test_a_pool_is_mapped_if_it_is_what_the_door_says(hand_over):
    descriptor = sealed(MINE.nbytes, fcntl.F_SEAL_SHRINK)
    assert hand_over([descriptor]) == ("corrupt", "checksum")
    os.close(descriptor)


@over("shm")
@pytest.mark.parametrize(
    ("size", "seals", "wrong"),
    [
        (MINE.nbytes, 0, {}),  # its worker could shrink it while it is read, which would kill this one
        (MINE.nbytes, fcntl.F_SEAL_GROW, {}),
        (MINE.nbytes - 1, fcntl.F_SEAL_SHRINK, {}),
        (0, fcntl.F_SEAL_SHRINK, {}),
        (MINE.nbytes, fcntl.F_SEAL_SHRINK, {"n_frames": MINE.n_frames + 1}),
        (MINE.nbytes, fcntl.F_SEAL_SHRINK, {"n_frames": 0}),
        (MINE.nbytes, fcntl.F_SEAL_SHRINK, {"n_frames": -5}),
        (MINE.nbytes, fcntl.F_SEAL_SHRINK, {"slot_stride": MINE.slot_stride - 1}),
        (MINE.nbytes, fcntl.F_SEAL_SHRINK, {"slot_stride": MINE.slot_stride + 1}),
        (MINE.nbytes, fcntl.F_SEAL_SHRINK, {"slot_stride": 2**62}),
        (MINE.nbytes, fcntl.F_SEAL_SHRINK, {"slot_stride": 2**63 - 1, "n_frames": 2**60}),
        (MINE.nbytes, fcntl.F_SEAL_SHRINK, {"slot_stride": -MINE.slot_stride}),
    ],
)
def test_a_pool_that_is_not_what_the_door_says_is_refused(hand_over, size, seals, wrong):
    descriptor = sealed(size, seals)
    assert hand_over([descriptor], **wrong) == ("refused", "geometry")
    os.close(descriptor)


@over("shm")
def test_a_door_that_grants_what_its_pool_does_not_have_is_not_believed(hand_over):
    """Frames are looked at before anything is copied, whatever the door says to them."""
    descriptor = sealed(MINE.nbytes, fcntl.F_SEAL_SHRINK)
    for bad in (MINE.n_frames, -1, 2**31 - 1):
        assert hand_over([descriptor], theirs=bad) == ("refused", "frames")
    os.close(descriptor)


@over("shm")
def test_what_is_no_pool_is_refused(hand_over, tmp_path):
    (tmp_path / "file").write_bytes(bytes(MINE.nbytes))
    with open(tmp_path / "file", "rb") as file, open("/dev/zero", "rb") as endless:
        for other in (file, endless):
            assert hand_over([other.fileno()]) == ("refused", "geometry")


@over("shm")
def test_a_door_that_hands_nothing_over_is_lost(hand_over):
    assert hand_over([]) == ("lost", "garbled")


@over("shm")
def test_another_users_door_is_refused(hand_over, us, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda user=os.geteuid(): user + 1)
    assert hand_over([]) == ("refused", "user")
