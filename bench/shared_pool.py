"""What it costs the forward pass that other processes can map the KV pool.

    python bench/shared_pool.py [MODEL] [--threads N] [--rounds N]

The same steps on two tapes, one after the other by turns: with private memory, and with shared memory, which has large pages only if
/sys/kernel/mm/transparent_hugepage/shmem_enabled says so. Prints the median time of a step in milliseconds and the ratio.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from tokenmill.core.types import FRAME
from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.measure.timing import seconds_of
from tokenmill.models.loader import load
from tokenmill.weights.catalogue import resolve

STEPS = {"decode, 1 stream": (1, 1), "decode, 16 streams": (16, 1), "prefill of 256": (1, 256)}
"""(streams, rows of each)"""

CONTEXTS = (128, 2048, 8192)
KV_BYTE = 0x3C
SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    pool = Pool(options.threads)
    model = load(resolve(options.model), pool)
    frames = (max(CONTEXTS) + 256) // FRAME
    rng = np.random.default_rng(1)
    tapes = [Tape(model.program, model.weights, model.vectors, pool, 256, 16, 16 * frames, shared=shared) for shared in (False, True)]
    for tape in tapes:
        tape.fill_kv(KV_BYTE)
    print(f"{SETTING}: {SETTING.read_text().strip() if SETTING.exists() else 'not there'}")
    print(f"{'':20} {'context':>7} {'private':>8} {'shared':>8} {'ratio':>6}")
    start = np.zeros(1, np.int32)
    for name, (streams, rows) in STEPS.items():
        for context in CONTEXTS:
            segments = [Segment(i * rows, rows, context, (Pages(np.array([i * frames], np.int32), start),)) for i in range(streams)]
            tokens = rng.integers(0, model.config.vocab, streams * rows).astype(np.int32)
            batch = Batch(tokens, segments, np.arange(streams, dtype=np.int32))
            times: list[list[float]] = [[], []]
            for _ in range(options.rounds):
                for tape, spent in zip(tapes, times, strict=True):
                    tape.run(batch)
                    spent.append(seconds_of(lambda tape=tape, batch=batch: tape.run(batch)))
            private, shared = map(statistics.median, times)
            print(f"{name:20} {context:7} {1e3 * private:8.2f} {1e3 * shared:8.2f} {shared / private:6.3f}", flush=True)


if __name__ == "__main__":
    main()
