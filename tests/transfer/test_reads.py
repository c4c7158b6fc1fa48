"""Reads between two real processes, by every connector: what comes, what is refused, and who is told why."""

from __future__ import annotations

import random
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from fake_pools import MINE, PIECE, SLOTS, THEIRS, draw, random_bytes, stream, written

from tokenmill.kernels.frames import BLOCK, Geometry
from tokenmill.transfer.connector import Status

COUNTS = [40, 13, 22]


@pytest.fixture
def rng():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def read(us, peer, granted, theirs, mine, **wrong):
    nonce, checksum = granted
    usual = {"address": peer.address, "boot": peer.setup.boot, "nonce": nonce, "checksum": checksum}
    return us.reader.read(theirs=theirs, mine=mine, **usual | wrong)


def test_frames_come_to_other_frames_of_another_pool_and_nothing_else_changes(rng, start_peer, us):
    peer = start_peer()
    theirs, mine = draw(rng, THEIRS, COUNTS), draw(rng, MINE, COUNTS)
    assert read(us, peer, peer.grant(theirs), theirs, mine) == Status()
    come = stream(peer.content, THEIRS, theirs)
    np.testing.assert_array_equal(us.memory.data, written(us.content, MINE, mine, come))


def test_a_thousand_random_reads_give_what_numpy_gives(rng, start_peer, us):
    """Under few nonces, of all sizes, over one link; groups and whole reads can be empty."""
    peer = start_peer()
    nonces = [secrets.token_bytes(16) for _ in range(3)]
    everything = [np.arange(THEIRS.n_frames, dtype=np.int32)] * len(SLOTS)
    for nonce in nonces:
        peer.tell("grant", nonce, everything)
    source = us.side.memory.reserve(THEIRS)
    source.data[:] = peer.content
    content = us.content
    for _ in range(1000):
        counts = rng.integers(0, 30, len(SLOTS)) * (rng.random(len(SLOTS)) < 0.8)
        theirs, mine = draw(rng, THEIRS, list(counts)), draw(rng, MINE, list(counts))
        nonce = nonces[rng.integers(len(nonces))]
        checksum = source.frames(theirs).digest()
        assert us.reader.read(peer.address, peer.setup.boot, nonce, theirs, mine, checksum) == Status()
        content = written(content, MINE, mine, stream(peer.content, THEIRS, theirs))
        np.testing.assert_array_equal(us.memory.data, content)


def test_a_read_of_many_blocks_comes_whole(rng, start_peer, make_us):
    """Pieces that lie across the borders of blocks, and a last block that is not full."""
    theirs_in, mine_in = (Geometry((3, 1), n * 4999 + 5, 4999, n) for n in (260, 250))
    counts = [230, 17]
    assert 12 * BLOCK < 4999 * (3 * 230 + 17)
    peer, us = start_peer(geometry=theirs_in), make_us(mine_in)
    theirs, mine = draw(rng, theirs_in, counts), draw(rng, mine_in, counts)
    assert read(us, peer, peer.grant(theirs), theirs, mine) == Status()
    come = stream(peer.content, theirs_in, theirs)
    np.testing.assert_array_equal(us.memory.data, written(us.content, mine_in, mine, come))


def test_chunks_are_granted_one_after_another_under_one_nonce(rng, start_peer, us):
    peer = start_peer()
    theirs, mine = draw(rng, THEIRS, COUNTS), draw(rng, MINE, COUNTS)
    first, second, *to = ([part[a:b] for part in of] for of in (theirs, mine) for a, b in ((0, 6), (6, None)))
    granted = peer.grant(first)
    assert read(us, peer, granted, second, to[1]).reason == "frames"
    later = peer.grant(second, granted[0])
    assert read(us, peer, later, second, to[1]) == Status()
    assert read(us, peer, granted, first, to[0]) == Status()
    np.testing.assert_array_equal(us.memory.frames(mine).gather(), stream(peer.content, THEIRS, theirs))


def test_what_is_not_granted_is_refused_and_the_link_goes_on(rng, start_peer, us):
    peer = start_peer()
    theirs, mine = draw(rng, THEIRS, COUNTS), draw(rng, MINE, COUNTS)
    granted, other = peer.grant(theirs), peer.grant(theirs)
    more = [np.append(theirs[0][1:], np.setdiff1d(np.arange(THEIRS.n_frames), theirs[0])[0]).astype(np.int32), *theirs[1:]]
    swapped = [theirs[0], theirs[2][:13], np.append(theirs[2], theirs[1])[:22]]
    before = us.memory.data.copy()
    for wrong, reason in (
        (read(us, peer, granted, theirs, mine, nonce=secrets.token_bytes(16)), "nonce"),
        (read(us, peer, granted, more, mine), "frames"),
        (read(us, peer, granted, swapped, mine), "frames"),
    ):
        assert (wrong.outcome, wrong.reason) == ("refused", reason)
        assert wrong.detail
    peer.tell("revoke", granted[0])
    refused = read(us, peer, granted, theirs, mine)
    assert (refused.outcome, refused.reason) == ("refused", "nonce")
    np.testing.assert_array_equal(us.memory.data, before)
    place = us.reader._places[peer.address]
    link = place.link
    assert read(us, peer, other, theirs, mine) == Status()
    assert place.link is link is not None


def test_a_ticket_is_not_trusted_with_numbers(rng, start_peer, us):
    """Frames that cannot be are refused before the peer is asked, or by the peer."""
    peer = start_peer()
    theirs, mine = draw(rng, THEIRS, COUNTS), draw(rng, MINE, COUNTS)
    granted = peer.grant(theirs)
    assert read(us, peer, granted, theirs, mine) == Status()
    before = us.memory.data.copy()
    n = THEIRS.n_frames
    for bad in (n, -1, -(2**31), 2**31 - 1, 2**31, 2**32 + int(theirs[0][0]), 2**70, "1", None, 1.5, [1]):
        wrong = [[bad, *theirs[0][1:].tolist()], *theirs[1:]]
        status = read(us, peer, granted, wrong, mine)
        assert (status.outcome, status.reason) == ("refused", "frames"), bad
    for wrong in (theirs[:2], [*theirs, theirs[0]], [theirs[0][1:], *theirs[1:]], [theirs[1], theirs[0], theirs[2]], []):
        assert read(us, peer, granted, wrong, mine).reason == "frames"
    np.testing.assert_array_equal(us.memory.data, before)
    assert read(us, peer, granted, theirs, mine) == Status()


def test_ones_own_frames_are_not_the_peers_business(start_peer, us):
    """A wrong number of ours is a fault of ours."""
    peer = start_peer()
    one = [np.zeros(1, np.int32)] * 3
    for number in (MINE.n_frames, -1):
        with pytest.raises(ValueError, match=f"frame {number} is not in a pool of {MINE.n_frames}"):
            read(us, peer, (bytes(16), b""), one, [np.array([number], np.int32)] * 3)


def test_bytes_that_are_not_those_that_were_meant_are_corrupt(rng, start_peer, us):
    """A byte changes after the checksum was taken: of the last piece, of any, or the checksum itself."""
    peer = start_peer()
    theirs, mine = draw(rng, THEIRS, COUNTS), draw(rng, MINE, COUNTS)
    granted = peer.grant(theirs)
    assert read(us, peer, granted, theirs, mine) == Status()
    for checksum in (bytes(8), b"", granted[1][:7], granted[1] + b"\0"):
        assert read(us, peer, granted, theirs, mine, checksum=checksum).outcome == "corrupt"
    changed = theirs[0][rng.integers(len(theirs[0]))]
    peer.tell("corrupt", frames=[np.array([changed], np.int32), *[np.empty(0, np.int32)] * 2])
    status = read(us, peer, granted, theirs, mine)
    assert (status.outcome, status.reason) == ("corrupt", "checksum")
    assert granted[1].hex() in status.detail


@pytest.mark.parametrize(
    ("setup", "reason", "words"),
    [
        ({"fingerprint": "e" * 64}, "fingerprint", "model file"),
        ({"geometry": replace(THEIRS, slots=(7, 3))}, "geometry", "(7, 3)"),
        ({"geometry": replace(THEIRS, slots=(7, 5, 3))}, "geometry", "(7, 5, 3)"),
        ({"geometry": replace(THEIRS, piece_bytes=PIECE - 4)}, "geometry", f"and {PIECE - 4}"),
    ],
)
def test_another_model_or_format_is_refused_by_the_door(start_peer, us, setup, reason, words):
    peer = start_peer(**setup)
    some = [np.zeros(1, np.int32)] * 3
    status = read(us, peer, (bytes(16), bytes(8)), some, some)
    assert (status.outcome, status.reason) == ("refused", reason)
    assert "the reader has" in status.detail
    assert words in status.detail


def test_every_start_of_a_worker_is_another_worker(rng, start_peer, us):
    peer = start_peer()
    theirs, mine = draw(rng, THEIRS, COUNTS), draw(rng, MINE, COUNTS)
    granted = peer.grant(theirs)
    status = read(us, peer, granted, theirs, mine, boot="another")
    assert (status.outcome, status.reason) == ("refused", "boot")
    assert read(us, peer, granted, theirs, mine) == Status()


def test_threads_read_from_several_peers_at_once(rng, start_peer, make_us):
    """Each into frames of its own; of one peer one after the other."""
    mine_in = replace(MINE, n_frames=450, slot_stride=450 * PIECE)
    us, peers = make_us(mine_in), [start_peer(seed=seed) for seed in (5, 8)]
    counts = [10, 9, 3]
    free = draw(rng, mine_in, [8 * n for n in counts])
    to = [[part[n * i : n * (i + 1)] for part, n in zip(free, counts, strict=True)] for i in range(8)]
    begin = threading.Barrier(8)

    def run(i):
        begin.wait()
        peer = peers[i % 2]
        for theirs, granted in work[i]:
            assert read(us, peer, granted, theirs, to[i]) == Status()
            np.testing.assert_array_equal(us.memory.frames(to[i]).gather(), stream(peer.content, THEIRS, theirs))

    work = []
    for i in range(8):
        froms = [draw(rng, THEIRS, counts) for _ in range(10)]
        work.append([(theirs, peers[i % 2].grant(theirs)) for theirs in froms])
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(run, i) for i in range(8)]:
            done.result()


def test_a_pool_of_another_process_really_was_read(start_peer, us):
    """The truth is known here from the seed alone."""
    peer = start_peer(seed=77)
    np.testing.assert_array_equal(peer.content, random_bytes(THEIRS, 77))
    one = [np.array([4], np.int32)] * 3
    assert read(us, peer, peer.grant(one), one, one) == Status()
    assert us.memory.frames(one).gather().tobytes() == stream(random_bytes(THEIRS, 77), THEIRS, one).tobytes()
