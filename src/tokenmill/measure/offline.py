"""A list of prompts through `LLM`, as a batch job would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenmill.core.types import SamplingParams
from tokenmill.llm import LLM
from tokenmill.measure.costs import Costs
from tokenmill.measure.report import Ceilings, Column, Row, Table
from tokenmill.measure.timing import seconds_of
from tokenmill.measure.workload import Lengths


@dataclass(frozen=True)
class Job:
    """Prompts of random tokens and how many tokens each is answered with."""

    prompts: list[list[int]]
    outputs: list[int]

    @classmethod
    def draw(cls, prompt: Lengths, output: Lengths, requests: int, vocab: int, seed: int) -> Job:
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, vocab, prompt.draw(rng)).tolist() for _ in range(requests)]
        return cls(prompts, [output.draw(rng) for _ in range(requests)])

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]


def offline_table() -> Table:
    columns = (
        Column("phase", "phase"),
        Column("tokens", "tokens"),
        Column("seconds", "s", 1, 2),
        Column("floor", "floor s", 1, 2),
        Column("tokens_per_second", "tokens/s"),
        Column("ratio", "ratio", 1, 2),
    )
    return Table("offline", "offline throughput", columns)


def measure_offline(llm: LLM, path: Path, job: Job, ceilings: Ceilings) -> list[Row]:
    """Prefill (every answer ends with its first token), all of it, and decode: what all takes longer than prefill.

    The `LLM` must not share prefixes, or the second run would find the first one's prompts.
    """
    costs, prompts = Costs.of(path), job.prompt_lengths
    llm.generate(job.prompts[:1], _params([2]))
    prefill = seconds_of(lambda: llm.generate(job.prompts, _params([1] * len(job.outputs))))
    whole = seconds_of(lambda: llm.generate(job.prompts, _params(job.outputs)))
    prefill_floor, decode_floor = costs.prefill_floor(ceilings, prompts), costs.answers_floor(ceilings, prompts, job.outputs)
    later = sum(job.outputs) - len(job.outputs)
    rows = [_row("prefill", sum(prompts), prefill, prefill_floor)]
    if later and whole > prefill:
        rows.append(_row("decode", later, whole - prefill, decode_floor))
    rows.append(_row("output", sum(job.outputs), whole, prefill_floor + decode_floor))
    rows.append(_row("total", sum(prompts) + sum(job.outputs), whole, prefill_floor + decode_floor))
    return rows


def _params(outputs: Sequence[int]) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=n) for n in outputs]


def _row(phase: str, tokens: int, seconds: float, floor: float) -> Row:
    return {
        "phase": phase,
        "tokens": tokens,
        "seconds": seconds,
        "floor": floor,
        "tokens_per_second": tokens / seconds,
        "ratio": floor / seconds if floor else None,
    }
