"""Peers that die, hang, come back, or are none: every read ends, says why, and harms nothing that comes after it."""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_pools import MINE, THEIRS, draw, stream
from fake_workers import over

from tokenmill.kernels.frames import BLOCK, Geometry
from tokenmill.transfer.connector import Status
from tokenmill.transfer.stream import Stream

COUNTS = [40, 13, 22]
NONCE = bytes(range(16))
LARGE = Geometry((4,), 4 * BLOCK, 4096, 4 * BLOCK // 4096)
"""16 blocks: a read of it has a middle."""


@pytest.fixture
def rng():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def everything(geometry):
    return [np.arange(geometry.n_frames, dtype=np.int32)] * len(geometry.slots)


def again_at(peer, wire):
    """Options of a peer that opens its door where `peer` had it."""
    if wire.connector == "shm":
        return {"socket_path": peer.address.removeprefix("shm:")}
    return {"port": int(peer.address.rpartition(":")[2])}


def test_a_peer_killed_in_the_middle_of_a_read_is_lost(start_peer, make_us):
    peer, us = start_peer(geometry=LARGE, fault="die"), make_us(LARGE)
    nonce, checksum = peer.grant(everything(LARGE))
    status = us.reader.read(peer.address, peer.setup.boot, nonce, everything(LARGE), everything(LARGE), checksum)
    assert (status.outcome, status.reason) == ("lost", "ended")
    assert peer.process.wait() == -9
    status = us.reader.read(peer.address, peer.setup.boot, nonce, everything(LARGE), everything(LARGE), checksum)
    assert (status.outcome, status.reason) == ("lost", "unreachable")


@pytest.mark.parametrize(("wire", "kind"), [("shm", "path"), ("shm", "name"), ("tcp", "port"), ("tcp with TLS", "port")], indirect=["wire"])
def test_a_peer_started_again_at_the_same_address_is_another_one(rng, wire, start_peer, us, tmp_path, kind):
    """The kept link is dead. What the old one had granted is refused, the new one is read from at once."""
    options = {"socket_path": str(tmp_path / "door")} if kind == "path" else {}
    old = start_peer(options=options)
    theirs, mine = draw(rng, THEIRS, COUNTS), draw(rng, MINE, COUNTS)
    granted = old.grant(theirs)
    assert us.reader.read(old.address, old.setup.boot, granted[0], theirs, mine, granted[1]) == Status()
    old.kill()
    new = start_peer(options=again_at(old, wire), seed=9)
    assert new.address == old.address
    fresh = new.grant(theirs)
    assert us.reader.read(new.address, new.setup.boot, fresh[0], theirs, mine, fresh[1]) == Status()
    np.testing.assert_array_equal(us.memory.frames(mine).gather(), stream(new.content, THEIRS, theirs))
    status = us.reader.read(old.address, old.setup.boot, granted[0], theirs, mine, granted[1])
    assert (status.outcome, status.reason) == ("refused", "boot")
    assert us.reader.read(new.address, new.setup.boot, fresh[0], theirs, mine, fresh[1]) == Status()


def test_a_link_that_has_broken_is_made_again_within_a_read(rng, start_peer, us):
    peer = start_peer()
    theirs, mine = draw(rng, THEIRS, COUNTS), draw(rng, MINE, COUNTS)
    granted = peer.grant(theirs)
    for _ in range(3):
        assert us.reader.read(peer.address, peer.setup.boot, granted[0], theirs, mine, granted[1]) == Status()
        us.reader._places[peer.address].link.cut()


def test_a_link_that_breaks_while_it_is_used_is_made_again_too(rng, start_peer, us, monkeypatch):
    """It looked sound when the read began."""
    peer = start_peer()
    theirs, mine = draw(rng, THEIRS, COUNTS), draw(rng, MINE, COUNTS)
    granted = peer.grant(theirs)
    for _ in range(3):
        assert us.reader.read(peer.address, peer.setup.boot, granted[0], theirs, mine, granted[1]) == Status()
        link = us.reader._places[peer.address].link
        monkeypatch.setattr(link, "ended", lambda: False)
        link.cut()


@over("tcp", "tcp with TLS")
def test_a_grant_revoked_in_the_middle_of_a_read_ends_it(start_peer, make_us):
    """Where the door sends; by shm the reader has been let in, and the checksum decides."""
    peer, us = start_peer(geometry=LARGE, fault="revoke"), make_us(LARGE)
    nonce, checksum = peer.grant(everything(LARGE))
    for _ in range(2):
        status = us.reader.read(peer.address, peer.setup.boot, nonce, everything(LARGE), everything(LARGE), checksum)
        assert (status.outcome, status.reason) == ("refused", "nonce")


def test_a_peer_that_hangs_is_lost_in_time(start_peer, make_us):
    us = make_us(timeout=0.2)
    peer = start_peer()
    granted = peer.grant(everything(THEIRS))
    one = [np.zeros(1, np.int32)] * 3
    peer.stop()
    status = us.reader.read(peer.address, peer.setup.boot, granted[0], one, one, bytes(8))
    assert (status.outcome, status.reason) == ("lost", "silent")


def test_nobody_there_is_lost(wire, make_us, tmp_path):
    us = make_us()
    one = [np.zeros(1, np.int32)] * 3
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        places = {
            "shm": ["shm:@nobody-" + secrets.token_hex(4), f"shm:{tmp_path}/none", "shm:" + "x" * 300, "shm:a\0b", "shm:"],
            "tcp": [f"tcp:127.0.0.1:{port}", "tcp:no.such.host.invalid:80", "tcp:" + "x" * 300 + ":80"],
            "nixl": [f"nixl:127.0.0.1:{port}"],
        }
        for address in places[wire.connector]:
            status = us.reader.read(address, "boot", NONCE, one, one, bytes(8))
            assert (status.outcome, status.reason) == ("lost", "unreachable"), address


def test_what_is_no_address_is_refused(wire, us):
    one = [np.zeros(1, np.int32)] * 3
    of_tcp = ("tcp:", "tcp:host", "tcp:1:2:3", "tcp:host:99999", "tcp:[::1]", "tcp::1")
    for address in ("", "ftp:x", "http://x", "SHM:@a", *(of_tcp if wire.connector == "tcp" else ())):
        status = us.reader.read(address, "boot", NONCE, one, one, bytes(8))
        assert (status.outcome, status.reason) == ("refused", "address"), address


def test_a_reader_that_is_closed_ends_its_reads(start_peer, us, monkeypatch):
    """The one that waits for a peer which hangs, and those that come after."""
    peer = start_peer()
    granted = peer.grant(everything(THEIRS))
    one = [np.zeros(1, np.int32)] * 3
    asked = threading.Event()

    def read():
        return us.reader.read(peer.address, peer.setup.boot, granted[0], one, one, bytes(8))

    def send(message, send=Stream.send):
        send(link._stream, message)
        asked.set()

    assert read().outcome == "corrupt"
    link = us.reader._places[peer.address].link
    monkeypatch.setattr(link._stream, "send", send)
    peer.stop()
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(read)
        asked.wait()
        us.reader.close()
        assert waiting.result().outcome == "lost"
    assert (read().outcome, read().detail) == ("lost", "this worker reads no more")


def test_the_pool_of_a_peer_that_has_died_is_let_go(wire, start_peer, make_us):
    """Its memory would stay as long as it is mapped here."""
    us, peers = make_us(), [start_peer(), start_peer()]
    one = [np.zeros(1, np.int32)] * 3
    for peer in peers:
        granted = peer.grant(everything(THEIRS))
        assert us.reader.read(peer.address, peer.setup.boot, granted[0], one, one, granted[1]).outcome == "corrupt"
    before = mapped_pools()
    us.reader.tend()
    assert len(us.reader._places) == 2
    peers[0].kill()
    us.reader.tend()
    assert list(us.reader._places) == [peers[1].address]
    if wire.connector == "shm":
        assert mapped_pools() == before - 1


def mapped_pools():
    with open("/proc/self/maps") as maps:
        return sum("memfd:tokenmill-kv" in line for line in maps)


@over("shm", "tcp", "tcp with TLS")
def test_nothing_is_left_open_behind_links(start_peer, us):
    peer = start_peer()
    granted = peer.grant(everything(THEIRS))
    one = [np.zeros(1, np.int32)] * 3

    def read():
        assert us.reader.read(peer.address, peer.setup.boot, granted[0], one, one, bytes(8)).outcome == "corrupt"
        us.reader._places[peer.address].drop()
        return len(os.listdir("/proc/self/fd")), mapped_pools()

    before = read()
    for _ in range(20):
        assert read() == before
