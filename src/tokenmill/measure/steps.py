"""Time of one step against the number of sequences in it, beside its floor: of the forward pass alone, or of an engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.messages import Generate
from tokenmill.core.types import FRAME, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.kernels.layout import KVFormat, KVLayout
from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.kv.footprint import frames_for
from tokenmill.measure.costs import Costs
from tokenmill.measure.kv_model import CHUNK, KVModel
from tokenmill.measure.plot import Chart, Line
from tokenmill.measure.report import Ceilings, Column, Row, Table
from tokenmill.measure.timing import median_seconds, seconds_of
from tokenmill.models.loader import load

MAX_STREAMS = 64
"""A step of the forward pass gives at most so many rows of logits."""

PREFILL_RUNS, DECODE_RUNS = 7, 25
KV_BYTE = 0x3C
"""What the KV pool is filled with, so that it is really there: 0x3c3c is a small bf16."""


def steps_table(name: str, title: str) -> Table:
    columns = (
        Column("phase", "phase"),
        Column("streams", "streams"),
        Column("tokens", "tokens"),
        Column("context", "context"),
        Column("seconds", "step ms", 1e-3, 2),
        Column("floor", "floor ms", 1e-3, 2),
        Column("tokens_per_second", "tokens/s"),
        Column("floor_tokens_per_second", "floor"),
        Column("ratio", "ratio", 1, 2),
    )
    return Table(name, title, columns)


class ForwardPass:
    """A model on a tape of its own: no scheduler, no sampling, no text."""

    def __init__(self, path: Path, pool: Pool, prompt: int, streams: int, context: int, seed: int, kv: KVFormat | None = None) -> None:
        """prompt: tokens of the longest prefill; streams: most sequences of a decode step; context: tokens before theirs."""
        if streams > MAX_STREAMS:
            raise ConfigError(f"--batch-sizes: {streams} is above {MAX_STREAMS}, the most rows of logits in one forward pass")
        model = load(path, pool)
        self._costs = Costs.of(path)
        self._rng = np.random.default_rng(seed)
        self._vocab = model.config.vocab
        self._prompt, self._context = prompt, context
        self._frames = context // FRAME + 1
        n_frames = max(-(-prompt // FRAME), streams * self._frames)
        rows = max(min(prompt, CHUNK), streams)
        self._tape = Tape(
            model.program, model.weights, model.vectors, pool, rows, MAX_STREAMS, n_frames, KVLayout.single(model.program, kv)
        )
        self._tape.fill_kv(KV_BYTE)

    def prompt(self, tokens: int) -> Callable[[], None]:
        """Computes a prompt of that many tokens when it is called, in chunks as an engine does. Its KV takes the first frames."""
        zero, chunks = np.zeros(1, np.int32), []
        for start in range(0, tokens, CHUNK):
            n = min(CHUNK, tokens - start)
            wanted = np.array([n - 1] if start + n == tokens else [], np.int32)
            chunks.append(Batch(self._tokens(n), [Segment(0, n, start, (Pages(zero, zero),))], wanted))

        def run() -> None:
            for chunk in chunks:
                self._tape.run(chunk)

        return run

    def prefill(self, ceilings: Ceilings) -> Row:
        seconds = median_seconds(self.prompt(self._prompt), PREFILL_RUNS)
        return _row("prefill", 1, self._prompt, 0, seconds, self._costs.prefill_floor(ceilings, [self._prompt]))

    def decode(self, ceilings: Ceilings, streams: int) -> Row:
        start = np.zeros(1, np.int32)
        segments = [Segment(i, 1, self._context, (Pages(np.array([i * self._frames], np.int32), start),)) for i in range(streams)]
        batch = Batch(self._tokens(streams), segments, np.arange(streams, dtype=np.int32))
        seconds = median_seconds(lambda: self._tape.run(batch), DECODE_RUNS)
        floor = self._costs.decode_floor(ceilings, streams, self._context)
        return _row("decode", streams, streams, self._context, seconds, floor)

    def _tokens(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return self._rng.integers(0, self._vocab, count).astype(np.int32)


def engine_steps(
    path: Path, threads: int, sizes: Iterable[int], context: int, ceilings: Ceilings, seed: int, cpus: str | None = None
) -> Iterator[Row]:
    """Decode steps of an engine in this process (plan, forward pass, sampling, commit) at each batch size.

    Raises `ConfigError` if that many sequences do not fit.
    """
    wanted = list(sizes)
    config = EngineConfig.from_settings(
        model=str(path),
        threads=threads,
        cpus=cpus,
        max_batch_size=max(wanted),
        block_manager_config={"enable_prefix_sharing": False},
    )
    engine = build_engine(config)
    costs, rng, info = Costs.of(path), np.random.default_rng(seed), engine.info
    model, longest = KVModel.of(path), context + _steps_before(max(wanted), context, config.chunk) + DECODE_RUNS + FRAME
    need = max(wanted) * model.footprint.taken(0, frames_for(longest), config.chunk) * model.frame_bytes
    if need > info.kv_bytes:
        told = f"{need / 2**30:.2f} GB of KV cache, the pool has {info.kv_bytes / 2**30:.2f}"
        raise ConfigError(f"{max(wanted)} sequences of {context} tokens need {told}: lower --batch-sizes or --context")
    try:
        for streams in wanted:
            limit = _steps_before(streams, context, config.chunk) + DECODE_RUNS + 2
            params = SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=limit)
            names = [f"{streams}.{i}" for i in range(streams)]
            for name in names:
                engine.add(Generate(request_id=name, prompt=rng.integers(0, info.vocab_size, context).tolist(), params=params))
            tokens = dict.fromkeys(names, 0)
            while not all(tokens.values()):
                for output in engine.step():
                    tokens[output.request_id] += len(output.tokens)
            engine.step()
            seconds = statistics.median(seconds_of(engine.step) for _ in range(DECODE_RUNS))
            reached = context + round(sum(tokens.values()) / streams) + 1 + DECODE_RUNS // 2
            for name in names:
                engine.abort(name)
            while engine.has_work:
                engine.step()
            yield _row("decode", streams, streams, reached, seconds, costs.decode_floor(ceilings, streams, reached))
    finally:
        engine.close()


def chart(table: Table) -> Chart:
    """Time of a decode step against the number of streams, beside its floor."""
    rows = [row for row in table.rows if row["phase"] == "decode"]
    xs = [float(row["streams"] or 0) for row in rows]
    lines = [
        Line("step", xs, [1e3 * float(row["seconds"] or 0) for row in rows]),
        Line("floor", xs, [1e3 * float(row["floor"] or 0) for row in rows], dashed=True),
    ]
    return Chart("decode step", "sequences in the batch", "milliseconds", lines, log_x=True)


def _steps_before(streams: int, context: int, chunk: int) -> int:
    """Most steps from the first sequence's first token to the last one's."""
    return -(-streams * context // chunk) + 1


def _row(phase: str, streams: int, tokens: int, context: int, seconds: float, floor: float) -> Row:
    return {
        "phase": phase,
        "streams": streams,
        "tokens": tokens,
        "context": context,
        "seconds": seconds,
        "floor": floor,
        "tokens_per_second": tokens / seconds,
        "floor_tokens_per_second": tokens / floor,
        "ratio": floor / seconds,
    }
