"""What an engine loses when another process burns a core: figures alone and disturbed, their ratio and its bound.

`python bench/busy_core.py [--threads N] [--cpus LIST] [--model MODEL] [--rounds N]`

Both are measured in turns. A system that is fair to threads leaves two of them, with one that is not ours, two thirds of two CPUs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGKILL

from tokenmill import LLM, SamplingParams
from tokenmill.measure.server import end_with_parent

BOUND = 0.5
PROMPT, CONTEXT, OUTPUT = 512, 128, 96


@contextmanager
def busy_core() -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes all the time. It ends with this one, however this one ends."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=lambda: end_with_parent(SIGKILL)) as process:
        try:
            yield process
        finally:
            process.kill()


def prefill(llm: LLM) -> float:
    """Tokens per second until the first token of a prompt."""
    [result] = llm.generate([[5] * PROMPT], SamplingParams(temperature=0, max_tokens=1))
    assert result.metrics.ttft is not None
    return PROMPT / result.metrics.ttft


def decode(llm: LLM, streams: int) -> float:
    """Tokens per second from the moment when every stream has its first."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    results = llm.generate([[5 + i] * CONTEXT for i in range(streams)], params)
    begun = max(result.metrics.arrival_time + (result.metrics.ttft or 0.0) for result in results)
    ended = max(result.metrics.arrival_time + (result.metrics.e2e or 0.0) for result in results)
    return streams * (OUTPUT - 1) / (ended - begun)


CASES: dict[str, Callable[[LLM], float]] = {
    "decode, 1 stream": lambda llm: decode(llm, 1),
    "decode, 16 streams": lambda llm: decode(llm, 16),
    f"prefill of {PROMPT}": prefill,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpus")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    settings = {"threads": options.threads, "cpus": options.cpus, "block_manager_config": {"enable_prefix_sharing": False}}
    alone: dict[str, list[float]] = {case: [] for case in CASES}
    disturbed: dict[str, list[float]] = {case: [] for case in CASES}
    with LLM(options.model, max_model_len=1024, **settings) as llm:
        for measure in CASES.values():
            measure(llm)
        for _ in range(options.rounds):
            for case, measure in CASES.items():
                alone[case].append(measure(llm))
            with busy_core():
                for case, measure in CASES.items():
                    disturbed[case].append(measure(llm))
        where = f" on CPUs {llm.info.cpus}" if llm.info.cpus else ""
        print(f"{llm.info.model}, {llm.info.threads} threads{where}, {llm.info.kernels} kernels; tokens/s, medians of {options.rounds}")
    print(f"{'':<20} {'alone':>8} {'busy core':>10} {'ratio':>6} {'bound':>6}")
    slow = False
    for case in CASES:
        before, after = statistics.median(alone[case]), statistics.median(disturbed[case])
        slow |= after < BOUND * before
        print(f"{case:<20} {before:8.0f} {after:10.0f} {after / before:6.2f} {BOUND:6.2f}{'  TOO SLOW' if after < BOUND * before else ''}")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
