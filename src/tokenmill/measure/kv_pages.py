"""Dynamic pages beside fixed sizes: entries of page tables, unfilled positions, and the time of decode steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tokenmill.core.config import PAGE_TOKENS, BlockManagerConfig
from tokenmill.core.types import FRAME, SamplingParams
from tokenmill.engine.generation import Generation
from tokenmill.engine.runner import Runner
from tokenmill.kernels.native import Pool
from tokenmill.kernels.tape import Tape
from tokenmill.kv.footprint import frames_for
from tokenmill.kv.manager import KVManager
from tokenmill.measure.costs import Costs
from tokenmill.measure.kv_model import CHUNK, KVModel
from tokenmill.measure.plot import Bars
from tokenmill.measure.report import Ceilings, Column, Row, Table, Tell
from tokenmill.measure.steps import KV_BYTE
from tokenmill.measure.timing import seconds_of
from tokenmill.models.loader import load
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.state import SamplerState
from tokenmill.scheduler.plan import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.sequence import Sequence

POLICIES: Mapping[str, BlockManagerConfig] = {
    "dynamic": BlockManagerConfig(enable_prefix_sharing=False),
    **{str(size): BlockManagerConfig(block_size=size, enable_prefix_sharing=False) for size in PAGE_TOKENS},
}

LONG = 32 * 1024
SHORT_PROMPTS = (9, 200)
"""Tokens of the prompts of short sequences, of which `SHORT` run at a time and `SHORT_STEPS` steps are looked at."""
SHORT, SHORT_STEPS = 32, 64
START = 2 * FRAME
"""Tokens of a prompt whose sequence grows from there, a token per step."""

CASES = ((1, 8192), (16, 1024))
"""Sequences in a decode step, and the context of each that the last measured one reaches."""
RUNS = 201


@dataclass
class Batch:
    """Sequences under one page policy, scheduled as an engine does. Until `run` is used nothing computes them."""

    model: KVModel
    n_frames: int
    config: BlockManagerConfig
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = KVManager(self.model.groups, self.n_frames, self.config)
        self.scheduler = Scheduler(self.kv, Limits(max_batch_size=max(SHORT, 16), chunk_size=CHUNK))

    def add(self, prompt: int) -> Sequence:
        params = SamplingParams(temperature=0, seed=0, max_tokens=1)  # which is an engine's to hold to: here nobody ends a sequence
        sequence = Sequence(str(len(self.sequences)), 0, [0] * prompt, params, 0, arrival=len(self.sequences))
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def skip(self) -> None:
        """A step as if it had been computed."""
        step = self.scheduler.schedule(0.0)
        assert step is not None, "there is no sequence"
        self.scheduler.commit(step, {work.sequence: [0] for work in step if work.samples})

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Until the sequence has computed so many tokens."""
        while sequence.computed < tokens:
            self.skip()

    def entries(self, sequence: Sequence) -> int:
        """Extents in the page table of the group that has most."""
        return max(len(table.first) for table in self.kv.tables(sequence.id))


def pages_table() -> Table:
    columns = (
        Column("policy", "pages"),
        Column("prompt_pages", "pages of a 32K prompt"),
        Column("prompt_entries", "entries"),
        Column("grown_pages", "grown to 32K"),
        Column("grown_entries", "entries"),
        Column("waste", "unfilled per short sequence", 1, 2),
        Column("waste_share", "% of its positions", 0.01, 1),
    )
    return Table("pages", "page tables, per KV group, and positions without a token", columns)


def page_rows(model: KVModel, seed: int) -> Iterator[Row]:
    """By policy: pages and entries of a table over 32K tokens, of a prompt alone in a fresh pool and of a sequence that grows beside
    another, a token per step, so that no two of its pages touch; and unfilled positions of short sequences while they decode."""
    for name, config in POLICIES.items():
        prompt = Batch(model, _frames(model, 1, LONG), config)
        one = prompt.add(LONG)
        prompt.grow(one, LONG)
        grown = Batch(model, _frames(model, 2, LONG), config)
        two = [grown.add(START) for _ in range(2)]
        grown.grow(two[-1], LONG)
        unfilled, filled = _short(model, config, seed)
        yield {
            "policy": name,
            "prompt_pages": _pages(prompt) / len(model.groups),
            "prompt_entries": prompt.entries(one),
            "grown_pages": _pages(grown) / 2 / len(model.groups),
            "grown_entries": grown.entries(two[-1]),
            "waste": unfilled,
            "waste_share": unfilled / (unfilled + filled),
        }


def _short(model: KVModel, config: BlockManagerConfig, seed: int) -> tuple[float, float]:
    """Unfilled and filled positions per short sequence and group, on average over the steps of their decoding."""
    rng = np.random.default_rng(seed)
    batch = Batch(model, _frames(model, SHORT, SHORT_PROMPTS[1] + SHORT_STEPS + 64), config)
    for prompt in rng.integers(*SHORT_PROMPTS, SHORT, endpoint=True):
        batch.add(int(prompt))
    while any(sequence.n_output == 0 for sequence in batch.sequences):
        batch.skip()
    unfilled, filled = [], []
    for _ in range(SHORT_STEPS):
        batch.skip()
        unfilled.append(batch.kv.use().unfilled / SHORT / len(model.groups))
        filled.append(statistics.mean(sequence.computed for sequence in batch.sequences))
    return statistics.mean(unfilled), statistics.mean(filled)


def _pages(batch: Batch) -> int:
    return sum(pages.used for pages in batch.kv.use().pages.values())


def _frames(model: KVModel, sequences: int, tokens: int) -> int:
    """Of a pool for so many sequences, with the spare frames that a scheduler keeps."""
    alone = model.footprint.taken(0, frames_for(tokens), CHUNK)
    return sequences * (alone + 16 * len(model.groups))


def steps_table() -> Table:
    columns = (
        Column("policy", "pages"),
        Column("streams", "streams"),
        Column("context", "context"),
        Column("entries", "entries"),
        Column("seconds", "step ms", 1e-3, 2),
        Column("floor", "floor ms", 1e-3, 2),
        Column("ratio", "ratio", 1, 2),
        Column("to_best", "/ best fixed", 1, 3),
    )
    return Table("steps", "decode steps of an engine over pages that do not touch", columns)


def measure_steps(path: Path, model: KVModel, pool: Pool, ceilings: Ceilings, tell: Tell) -> Iterator[Row]:
    """Decode steps (plan, forward pass, sampling, commit) under each policy, in turn and over the same memory: medians.

    Every sequence has grown beside another. to_best: the median over rounds of a step's time over that of the best fixed size.
    """
    loaded, costs = load(path, pool), Costs.of(path)
    cases = [(streams, min(context, model.context - FRAME)) for streams, context in CASES]
    n_frames = max(_frames(model, max(2, streams), context) for streams, context in cases)
    tape = Tape(loaded.program, loaded.weights, loaded.vectors, pool, CHUNK, 64, n_frames, model.layout)
    tape.fill_kv(KV_BYTE)
    for streams, context in cases:
        tell(f"measuring decode steps, {streams} of {context} tokens")
        batches = {name: _grown(model, n_frames, config, streams, context - RUNS) for name, config in POLICIES.items()}
        steps = {name: _Steps(batch, tape, pool, loaded.config.vocab) for name, batch in batches.items()}
        for step in steps.values():
            step.run()
        rounds = [{name: seconds_of(steps[name].run) for name in _rotated(list(steps), turn)} for turn in range(RUNS)]
        medians = {name: statistics.median(times[name] for times in rounds) for name in steps}
        best = min((name for name in steps if name != "dynamic"), key=medians.__getitem__)
        for name, batch in batches.items():
            floor = costs.decode_floor(ceilings, streams, context - RUNS // 2)
            yield {
                "policy": name,
                "streams": streams,
                "context": context,
                "entries": batch.entries(batch.sequences[0]),
                "seconds": medians[name],
                "floor": floor,
                "ratio": floor / medians[name],
                "to_best": statistics.median(times[name] / times[best] for times in rounds),
            }


def _grown(model: KVModel, n_frames: int, config: BlockManagerConfig, streams: int, context: int) -> Batch:
    batch = Batch(model, n_frames, config)
    for _ in range(max(2, streams)):
        batch.add(START)
    batch.grow(batch.sequences[-1], context)
    for sequence in batch.sequences[streams:]:
        batch.scheduler.finish(sequence)
    del batch.sequences[streams:]
    return batch


def _rotated(names: list[str], by: int) -> list[str]:
    at = by % len(names)
    return names[at:] + names[:at]


class _Steps:
    """Runs the steps of a batch on a tape that others use too."""

    def __init__(self, batch: Batch, tape: Tape, pool: Pool, vocab: int) -> None:
        self._batch = batch
        self._runner = Runner(tape, batch.kv, Sampler(pool), vocab)
        self._generations = {s: Generation(SamplerState(s.params, 0, s.token_ids, ()), frozenset()) for s in batch.sequences}

    def run(self) -> None:
        step = self._batch.scheduler.schedule(0.0)
        assert step is not None, "there is no sequence"
        result = self._runner.finish(self._runner.start(step), self._generations)
        self._batch.scheduler.commit(step, result.tokens)


def chart(table: Table) -> Bars:
    """Step times by policy."""
    cases = list(dict.fromkeys((row["streams"], row["context"]) for row in table.rows))
    times = {
        str(name): [1e3 * float(row["seconds"] or 0) for row in table.rows if row["policy"] == name]
        for name in dict.fromkeys(row["policy"] for row in table.rows)
    }
    return Bars("decode step by page size", "milliseconds", [f"{streams} x {context}" for streams, context in cases], times)
