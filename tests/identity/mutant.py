"""Run the comparison on another build of the native library, in a process of its own: `mutant.py LIBRARY MODEL SEED…`.

Serves the traffic of each seed in turn. Prints the first differences found and exits with 1, or with 0 if there are none: some faults
show only where a position that was decoded is computed again in a prompt, which not every traffic does.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path


def load(library: Path) -> None:
    """Make `library` what `tokenmill._native` means here."""
    spec = importlib.util.spec_from_file_location("tokenmill._native", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["tokenmill._native"] = module


def main(library: str, model: str, *seeds: str) -> int:
    load(Path(library))
    from comparison import Setting, Trial
    from request_pool import RequestPool

    from tokenmill import _native

    assert _native.__file__ == library
    settings = (Setting(chunk_size=2048, threads=1), Setting(max_batch_size=6, chunk_size=333, frames=160, threads=1))
    for seed, setting in itertools.product(seeds, settings):
        pool = RequestPool(Path(model), int(seed), n_short=12, n_talkative=4, n_long=6)
        trial = Trial(pool.alone, setting)
        found = trial.differences([*pool.short, *pool.talkative], arrivals=10) + trial.differences(pool.long, arrivals=6)
        print(f"seed {seed}, {setting}: {len(found)} of {trial.cases} cases differ", *(text[:400] for text in found[:2]), sep="\n")
        if found:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
