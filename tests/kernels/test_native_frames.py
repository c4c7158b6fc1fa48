"""Frames on their way between pools: against NumPy byte for byte, and a tape that goes on from what another one computed."""

from __future__ import annotations

import gc
import mmap
import os
import random
import sys
import threading

import numpy as np
import pytest
import xxhash

from tokenmill.core.types import FRAME
from tokenmill.kernels.frames import BLOCK, Checksum, Geometry, KVMemory
from tokenmill.kernels.layout import KVFormat, KVLayout
from tokenmill.kernels.native import PackedWeight, Pool, default_variant
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape

FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("int8", "int4"), ("int4", "int4"), ("bf16", "int4"), ("int4", "bf16")]


@pytest.fixture
def rng():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def places(geometry, numbers):
    """Of each byte of the stream, by the definition."""
    g = geometry
    starts = [
        slot * g.slot_stride + int(frame) * g.piece_bytes
        for slots, frames in zip(g.slots, numbers, strict=True)
        for slot in range(slots)
        for frame in frames
    ]
    return (np.array(starts, np.int64)[:, None] + np.arange(g.piece_bytes)).ravel()


def random_geometry(rng, slots):
    piece, n = int(rng.integers(1, 70)), int(rng.integers(40, 90))
    return Geometry(slots, n * piece + int(rng.integers(0, 9)), piece, n)


def random_memory(rng, geometry):
    return KVMemory(rng.integers(0, 256, geometry.nbytes, np.uint8), geometry)


def random_numbers(rng, geometry, counts, distinct=True):
    """Partly runs, partly scattered."""
    numbers = []
    for count in counts:
        if rng.random() < 0.3 and count:
            first = int(rng.integers(geometry.n_frames - count + 1))
            numbers.append(np.arange(first, first + count, dtype=np.int32))
        else:
            numbers.append(rng.choice(geometry.n_frames, count, replace=not distinct).astype(np.int32))
    return numbers


@pytest.mark.parametrize("slots", [(1,), (4,), (3, 5, 1)])
def test_all_moves_are_those_of_numpy(rng, slots):
    """Any part of any stream, with both pools of other sizes."""
    for _ in range(60):
        here = random_geometry(rng, slots)
        there = Geometry(slots, 100 * here.piece_bytes + 3, here.piece_bytes, 100)
        source, target = random_memory(rng, there), random_memory(rng, here)
        counts = [int(n) for n in rng.integers(0, 30, len(slots))]
        theirs, mine = random_numbers(rng, there, counts, distinct=False), random_numbers(rng, here, counts)
        come, to = source.data[places(there, theirs)], places(here, mine)
        out, into = source.frames(theirs), target.frames(mine)
        assert out.nbytes == into.nbytes == len(come)
        np.testing.assert_array_equal(out.gather(), come)
        start, stop = sorted(int(n) for n in rng.integers(0, len(come) + 1, 2))
        part = np.empty(stop - start, np.uint8)
        assert out.gather(part, start) is part
        np.testing.assert_array_equal(part, come[start:stop])
        # groups may name the same frame of one pool, so what is written last stays
        want = target.data.copy()
        want[to[start:stop]] = come[start:stop]
        kept = target.data.copy()
        into.scatter(part, start)
        np.testing.assert_array_equal(target.data, want)
        target.data[:] = kept
        into.copy(out, start, stop)
        np.testing.assert_array_equal(target.data, want)
        into.copy(out)
        want[to] = come
        np.testing.assert_array_equal(target.data, want)


def test_a_digest_is_that_of_the_stream_however_it_is_cut(rng):
    geometry = Geometry((5, 2), 900 * 333, 333, 900)
    memory = random_memory(rng, geometry)
    for counts in ([0, 0], [1, 0], [0, 3], [500, 300]):
        frames = memory.frames(random_numbers(rng, geometry, counts))
        want = xxhash.xxh3_64_digest(frames.gather())
        assert frames.digest() == want
        check = Checksum(frames)
        for stop in sorted(int(n) for n in rng.integers(0, frames.nbytes + 1, 9)):
            check.advance(stop)
        check.advance(frames.nbytes)
        assert check.digest() == want
    assert frames.nbytes > 2 * BLOCK


def test_a_digest_is_of_the_frames_bytes_and_of_no_others(rng):
    geometry = Geometry((2, 3), 20 * 16 + 1, 16, 20)
    memory = random_memory(rng, geometry)
    numbers = random_numbers(rng, geometry, [5, 7])
    inside = set(places(geometry, numbers).tolist())
    known = memory.frames(numbers).digest()
    for byte in range(geometry.nbytes):
        memory.data[byte] ^= 1
        assert (memory.frames(numbers).digest() != known) == (byte in inside)
        memory.data[byte] ^= 1


def test_what_is_not_there_is_refused(rng):
    geometry = Geometry((2, 4), 10 * 16, 16, 10)
    memory = random_memory(rng, geometry)
    none = np.empty(0, np.int32)
    for number in (-1, 10, 2**31 - 1, -(2**31)):
        with pytest.raises(ValueError, match=f"frame {number} is not in a pool of 10"):
            memory.frames([none, np.array([3, number], np.int32)])
    with pytest.raises(ValueError, match="frames of 1 KV groups, but the pool has 2"):
        memory.frames([none])
    frames, block = memory.frames([np.arange(3, dtype=np.int32), none]), np.empty(97, np.uint8)
    before = memory.data.copy()
    assert frames.nbytes == 96
    for start in (0, 95, 96, 97, 2**63):
        with pytest.raises(IndexError):
            frames.gather(block, start)
        with pytest.raises(IndexError):
            frames.scatter(block, start)
    with pytest.raises(IndexError):
        frames.copy(frames, 90, 97)
    with pytest.raises(TypeError):
        frames.copy(frames, 5, 4)
    with pytest.raises(ValueError, match="48 bytes does not fill one of 96"):
        frames.copy(half(memory))
    np.testing.assert_array_equal(memory.data, before)


def half(memory):
    """A stream of 48 bytes."""
    return KVMemory(memory.data, Geometry((1, 4), 10 * 16, 16, 10)).frames([np.arange(3, dtype=np.int32), np.empty(0, np.int32)])


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry((), 160, 16, 10),
        Geometry((1, 0), 160, 16, 10),
        Geometry((-1,), 160, 16, 10),
        Geometry((3,), 160, 16, 10),  # 480 bytes
        Geometry((2,), 159, 16, 10),
        Geometry((2,), 160, 0, 10),
        Geometry((2,), 160, 16, 0),
        Geometry((2,), 2**63, 16, 10),
        Geometry((2,), 2**70, 2**40, 2**30),
        Geometry((1,), 160, 1, 2**31),
    ],
)
def test_a_geometry_that_does_not_fit_its_memory_is_refused(geometry):
    with pytest.raises(ValueError, match="no KV pool is like this"):
        KVMemory(np.zeros(479, np.uint8), geometry)


def test_shared_memory_is_written_by_its_owner_alone(rng):
    """Others can map it, but not for writing, and nobody can change its size."""
    geometry = Geometry((3,), 1000 * 64, 64, 1000)
    memory = KVMemory.reserve(geometry)
    assert not memory.data.any()
    memory.data[:] = rng.integers(0, 256, geometry.nbytes, np.uint8)
    peer = KVMemory.mapped(memory.descriptor, geometry)
    np.testing.assert_array_equal(peer.data[: geometry.nbytes], memory.data)
    memory.data[5] ^= 1
    assert peer.data[5] == memory.data[5]
    everything = [np.arange(1000, dtype=np.int32)]
    frames = peer.frames(everything)
    for write in (lambda: frames.scatter(np.zeros(3, np.uint8)), lambda: frames.copy(memory.frames(everything))):
        with pytest.raises(ValueError, match="can only be read"):
            write()
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, 0)
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size)
    with pytest.raises(PermissionError):
        os.write(memory.descriptor, b"x")
    assert frames.digest() == memory.frames(everything).digest()


def test_a_pool_stays_as_long_as_its_frames(rng):
    geometry = Geometry((2,), 100 * 64, 64, 100)
    memory = KVMemory.reserve(geometry)
    memory.data[:] = rng.integers(0, 256, geometry.nbytes, np.uint8)
    everything = [np.arange(100, dtype=np.int32)]
    mapped, own = KVMemory.mapped(memory.descriptor, geometry).frames(everything), memory.frames(everything)
    want, descriptor = memory.data.tobytes(), memory.descriptor
    del memory
    gc.collect()
    assert os.fstat(descriptor).st_size >= geometry.nbytes
    assert own.gather().tobytes() == mapped.gather().tobytes() == want
    del own
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert mapped.gather().tobytes() == want


def test_moves_leave_the_interpreter_to_others():
    """While threads are not made to take turns, another one runs only if a move lets go of the lock."""
    geometry = Geometry((16,), 4096 * 1024, 1024, 4096)
    memory, other = KVMemory.reserve(geometry), KVMemory.reserve(geometry)
    everything = [np.arange(4096, dtype=np.int32)]
    out, into, block = memory.frames(everything), other.frames(everything), np.empty(geometry.nbytes, np.uint8)
    turn = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        for move in (lambda: out.gather(block), lambda: into.scatter(block), lambda: into.copy(out)):
            assert any(runs_beside(move) for _ in range(200))
    finally:
        sys.setswitchinterval(turn)


def runs_beside(move):
    """Whether a thread that could go on before a call went on in it: it may be that the system gave it no CPU."""
    went_on, may = [], threading.Lock()
    may.acquire()

    def wait():
        may.acquire()
        went_on.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    may.release()
    move()
    beside = bool(went_on)
    thread.join()
    return beside


# With a tape.

PROMPT, REST = 300, 21
FRAMES = -(-(PROMPT + REST) // FRAME)


def layout_of(program, form, kind):
    pairs = [(layer, head) for layer in range(program.layers) for head in range(program.shape.kv_heads)]
    if kind == "one group":
        return KVLayout.single(program, form)
    return KVLayout(form, (tuple(pairs[:3]), tuple(pairs[3:])), (None, None))


def tape_of(model, pool, n_frames, layout, shared, garbage):
    weights = {name: PackedWeight.pack(*file, pool) for name, file in model.files.items()}
    tape = Tape(model.program, weights, model.vectors, pool, PROMPT, REST, n_frames, layout, shared)
    tape.fill_kv(garbage)
    return tape


def scattered(rng, n_frames, groups):
    """Frames for a sequence in each group, none twice."""
    return np.split(rng.permutation(n_frames)[: groups * FRAMES].astype(np.int32), groups)


def step(tokens, frames, position, outputs):
    pages = tuple(Pages(numbers, np.arange(FRAMES, dtype=np.int32)) for numbers in frames)
    rows = len(tokens)
    return Batch(tokens, [Segment(0, rows, position, pages)], np.arange(rows - outputs, rows, dtype=np.int32))


@pytest.mark.parametrize("kind", ["one group", "groups of 3 and 5 slots"])
@pytest.mark.parametrize(("key", "value"), FORMATS)
@pytest.mark.parametrize("head_dim", [64, 48])
def test_a_tape_goes_on_from_frames_that_another_computed(rng, tiny_model, key, value, kind, head_dim):
    """By a copy out of its mapped pool and by bytes that were sent: every bit of what follows is as if it had computed all itself."""
    model = tiny_model(7, kv_heads=4, heads=8, head_dim=head_dim)
    layout = layout_of(model.program, KVFormat(key, value, 32), kind)
    groups, pool, tokens = len(layout.groups), Pool(2, default_variant()), model.tokens(PROMPT + REST)
    first = tape_of(model, pool, 101, layout, True, 0x11)
    theirs = scattered(rng, 101, groups)
    first.run(step(tokens[:PROMPT], theirs, 0, 1))
    want = first.run(step(tokens[PROMPT:], theirs, PROMPT, REST)).copy()
    full = PROMPT // FRAME
    numbers = [part[:full] for part in theirs]
    sent = first.memory.frames(numbers)
    assert sent.nbytes == full * layout.format.frame_bytes(head_dim) * 8
    peer = KVMemory.mapped(first.memory.descriptor, first.memory.geometry)
    for way, shared in (("copy", False), ("send", True)):
        second = tape_of(model, pool, 150, layout, shared, 0xEE)
        mine = scattered(rng, 150, groups)
        into = second.memory.frames([part[:full] for part in mine])
        if way == "copy":
            into.copy(peer.frames(numbers))
        else:
            into.scatter(sent.gather())
        assert into.digest() == sent.digest()
        second.run(step(tokens[full * FRAME : PROMPT], mine, full * FRAME, 1))
        np.testing.assert_array_equal(second.run(step(tokens[PROMPT:], mine, PROMPT, REST)), want)


def test_a_tapes_pool_can_be_mapped_only_if_it_was_asked_for(tiny_model):
    model = tiny_model(8)
    pool = Pool(1, default_variant())
    private, shared = (tape_of(model, pool, 5, None, wanted, 0) for wanted in (False, True))
    assert private.memory.descriptor is None
    assert os.readlink(f"/proc/self/fd/{shared.memory.descriptor}").startswith("/memfd:tokenmill-kv")
    assert shared.memory.geometry == private.memory.geometry == Geometry((2,), 5 * 2048, 2048, 5)
    assert shared.kv_bytes == private.kv_bytes == len(shared.memory.data)
    frames, gone = shared.memory.frames([np.arange(5, dtype=np.int32)]), shared.memory.descriptor
    shared.fill_kv(0x7B)
    del shared
    gc.collect()
    assert frames.gather().tobytes() == b"\x7b" * frames.nbytes
    del frames
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(gone)
