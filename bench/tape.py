"""One model's forward pass: figure, floor and ratio. `python bench/tape.py MODEL [threads]`

Decode at 128 tokens of context, prefill of 512. The floor of a decode step is the bytes that it must read (weights and KV) over
this machine's read bandwidth, which is measured first; that of a prefill is given by the products alone at the rate in INT8_OPS.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import Batch, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.models.loader import load
from tokenmill.weights.catalogue import resolve

INT8_OPS = 935e9
"""Operations per second of 2 Zen 4 cores' byte dot products, measured with a C loop."""

CONTEXT = 128


def median_seconds(step: Callable[[], object], runs: int) -> float:
    step()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def bandwidth(threads: int) -> float:
    """Bytes per second read from arrays far larger than the caches, by all threads together."""
    arrays = [np.ones(1 << 25, np.float64) for _ in range(threads)]

    def read() -> None:
        workers = [threading.Thread(target=array.max) for array in arrays]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return sum(a.nbytes for a in arrays) / median_seconds(read, 5)


def main() -> None:
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    rate = bandwidth(threads)
    pool = Pool(threads)
    model = load(resolve(sys.argv[1]), pool)
    tape = Tape(model.program, model.weights, model.vectors, pool, 512, 64, 4096)
    random = np.random.default_rng(0)
    shape = model.program.shape
    kv = model.program.layers * shape.kv_heads * shape.head_dim * 4 * CONTEXT
    head = model.weights["head"]
    products = sum(w.rows * w.cols for name, w in model.weights.items() if name not in ("embed", "head"))
    # A decode step reads every weight but the embedding table, of which a tied output head reads all.
    weights = sum(w.nbytes for name, w in model.weights.items() if name not in ("embed", "head")) + head.nbytes
    print(f"{sys.argv[1]}: {pool.threads} threads, {pool.variant}; reads {rate / 1e9:.1f} GB/s")
    print(f"{'':14} {'tokens/s':>9} {'floor':>9} {'ratio':>6}")

    def report(what: str, tokens: int, seconds: float, floor: float) -> None:
        print(f"{what:14} {tokens / seconds:9.0f} {tokens / floor:9.0f} {floor / seconds:6.2f}")

    one = np.zeros(1, np.int32)
    prompt = Batch(random.integers(0, 1000, 512).astype(np.int32), [Segment(0, 512, 0, one, one)], np.array([511], np.int32))
    report("prefill 512", 512, median_seconds(lambda: tape.run(prompt), 7), 2 * products * 512 / INT8_OPS)
    for streams in (1, 16, 32):
        segments = [Segment(i, 1, CONTEXT, np.array([i * (CONTEXT // 8 + 2)], np.int32), one) for i in range(streams)]
        batch = Batch(random.integers(0, 1000, streams).astype(np.int32), segments, np.arange(streams, dtype=np.int32))
        compute = 2 * (products + head.rows * head.cols) * streams / INT8_OPS
        read = (weights + streams * kv) / rate
        report(f"decode {streams}", streams, median_seconds(lambda batch=batch: tape.run(batch), 25), max(read, compute))


if __name__ == "__main__":
    main()
