"""How fast frames come from another process: GB/s by connector, chunk, model and KV format, beside memcpy of as many bytes.

    python bench/transfer.py [--only CONNECTOR] [--runs N] [--json]

Two real processes; a read includes the question, the copy, and the checksum of what has come. Both pools are larger than the caches, and
each read takes other frames, in pages of 64 tokens at random places. The row `all` is the first read, of the whole pool: by `shm` the
system has to show each page to the reader for the first time. Ends with status 1 if a connector misses its target in a chunk of 512 tokens
or more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

from tokenmill.core.kv_spelling import Format
from tokenmill.core.types import FRAME
from tokenmill.kernels.frames import Geometry, KVMemory
from tokenmill.kernels.layout import KVFormat
from tokenmill.transfer.connector import Options, Side
from tokenmill.transfer.names import CONNECTORS, Connector, open_door, open_reader

MODELS = {"SmolLM2-135M": (30 * 3, 64), "Qwen2.5-1.5B": (28 * 2, 128)}
"""(layers x KV heads, head_dim)"""

FORMATS = ("bf16", "int8/int4:64")
CHUNKS = (64, 512, 2048)
TARGETS = {"shm": 5.0, "tcp": 0.8}
"""GB/s, on a machine that does nothing else."""

POOL_BYTES = 384 << 20
PAGE = 8
"""Frames."""

SECRET = bytes(range(32))


def geometry(model: str, form: str) -> Geometry:
    slots, head_dim = MODELS[model]
    spelled = Format.parse(form)
    piece = KVFormat(spelled.key, spelled.value, spelled.group_size or 64).frame_bytes(head_dim)
    n_frames = POOL_BYTES // (slots * piece) // PAGE * PAGE
    return Geometry((slots,), n_frames * piece, piece, n_frames)


def pool(like: Geometry, seed: int) -> KVMemory:
    memory = KVMemory.reserve(like)
    memory.data[:] = np.random.default_rng(seed).integers(0, 256, 1 << 20, np.uint8)[np.arange(like.nbytes) & ((1 << 20) - 1)]
    return memory


def chunks(like: Geometry, frames: int, seed: int) -> Iterator[np.ndarray]:
    """Without end, each of pages that the last ones did not have as long as there are such."""
    rng = np.random.default_rng(seed)
    pages = frames // PAGE
    while True:
        order = rng.permutation(like.n_frames // PAGE)
        for start in range(0, len(order) - pages + 1, pages):
            yield (order[start : start + pages, None] * PAGE + np.arange(PAGE)).ravel().astype(np.int32)


def reads(like: Geometry, runs: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Tokens and frames of each read: all at once, and then chunks."""
    yield like.n_frames * FRAME, next(chunks(like, like.n_frames, seed))
    for tokens in CHUNKS:
        source = chunks(like, tokens // FRAME, seed + tokens)
        for _ in range(runs):
            yield tokens, next(source)


def serve(connector: Connector, model: str, form: str, runs: int) -> None:
    """The other process: opens a door, and tells all that a reader needs."""
    like = geometry(model, form)
    memory = pool(like, 1)
    door = open_door(connector, Side(memory, "served", "f"), Options(secret=SECRET, timeout=600))
    print(door.address, flush=True)
    for _, frames in reads(like, runs, 1):
        nonce = secrets.token_bytes(16)
        door.grant(nonce, [frames])
        checksum = memory.frames([frames]).digest()
        print(json.dumps({"nonce": nonce.hex(), "frames": frames.tolist(), "checksum": checksum.hex()}), flush=True)
    sys.stdin.read()
    door.close()


def measure(connector: Connector, model: str, form: str, runs: int) -> Iterator[dict[str, object]]:
    like = geometry(model, form)
    memory = pool(like, 2)
    command = [sys.executable, __file__, "--serve", connector, model, form, "--runs", str(runs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        address = other.stdout.readline().strip()
        tickets = [(tokens, mine, json.loads(other.stdout.readline())) for tokens, mine in reads(like, runs, 2)]
        reader = open_reader(Side(memory, "reading", "f"), Options(secret=SECRET, timeout=600))
        for tokens, group in itertools.groupby(tickets, key=lambda ticket: ticket[0]):
            times = []
            for _, mine, ticket in group:
                theirs = np.array(ticket["frames"], np.int32)
                nonce, checksum = bytes.fromhex(ticket["nonce"]), bytes.fromhex(ticket["checksum"])
                started = time.perf_counter()
                status = reader.read(address, "served", nonce, [theirs], [mine], checksum)
                times.append(time.perf_counter() - started)
                if status.outcome != "ok":
                    raise SystemExit(f"a read failed: {status}")
            nbytes = memory.frames([mine]).nbytes
            yield {
                "connector": connector,
                "model": model,
                "kv": form,
                "tokens": tokens,
                "bytes": nbytes,
                "gb_per_second": nbytes / statistics.median(times) / 1e9,
                "memcpy_gb_per_second": memcpy(memory.data, min(nbytes, like.nbytes // 4), runs),
            }
        reader.close()
        other.communicate()


def memcpy(data: np.ndarray, nbytes: int, runs: int) -> float:
    """GB/s of one contiguous copy of so many bytes between two places that are in no cache."""
    target = data[: len(data) // 2]
    source = data[len(data) // 2 :]
    steps = itertools.cycle(range(0, len(target) - nbytes + 1, nbytes))
    times = []
    for _ in range(runs):
        at = next(steps)
        started = time.perf_counter()
        np.copyto(target[at : at + nbytes], source[at : at + nbytes])
        times.append(time.perf_counter() - started)
    return nbytes / statistics.median(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CONNECTORS, help="measure this connector alone (else those that have targets)")
    parser.add_argument("--runs", type=int, default=25, help="reads of each kind, of which the median counts")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve, options.runs)
        return
    rows = []
    if not options.json:
        print(f"{'connector':9}  {'model':13} {'kv':13} {'tokens':>6} {'MB':>7} {'GB/s':>6} {'target':>6} {'memcpy':>6} {'ratio':>5}")
    for connector in [options.only] if options.only else TARGETS:
        for model, form in itertools.product(MODELS, FORMATS):
            for row in measure(connector, model, form, options.runs):
                rows.append(row)
                if not options.json:
                    print_row(row)
    if options.json:
        print(json.dumps(rows))
    if any(row["tokens"] in CHUNKS[1:] and row["gb_per_second"] < TARGETS.get(row["connector"], 0) for row in rows):
        raise SystemExit(1)


def print_row(row: dict) -> None:
    speed, floor, target = row["gb_per_second"], row["memcpy_gb_per_second"], TARGETS.get(row["connector"])
    tokens = row["tokens"] if row["tokens"] in CHUNKS else "all"
    what = f"{row['connector']:9}  {row['model']:13} {row['kv']:13} {tokens:>6} {row['bytes'] / 1e6:7.2f}"
    print(f"{what} {speed:6.2f} {target or '-':>6} {floor:6.2f} {speed / floor:5.2f}", flush=True)


if __name__ == "__main__":
    main()
