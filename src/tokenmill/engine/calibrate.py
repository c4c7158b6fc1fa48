"""Run a model to find the range of its keys and which of its heads look far back (docs/calibration.md)."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenmill.core.types import FRAME
from tokenmill.kernels.layout import KeyCalibration
from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import Batch, Pages, Program, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.kv.footprint import frames_for
from tokenmill.models.calibration import Calibration, calibration_path, read_calibration, write_calibration
from tokenmill.models.loader import Model
from tokenmill.text.samples import calibration_texts
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.weights.vocabulary import load_tokenizer

if TYPE_CHECKING:
    from tokenmill.engine.loading import Loaded

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

ROWS = 256
"""Tokens in one step, and of a piece of text."""

PIECES = 4
"""Pieces of each text."""

BLOCK, REPEATED, SKIPPED = 1024, 256, 64
"""Tokens of a random sequence, and how many of them come again after it, from the given place on: further back than any window of
recent positions, and not among the first ones, to which heads attend whatever stands there."""

FARTHEST = 1 << 15
"""Positions that the range of keys is to hold for."""

SEED = 0
SMALLEST = 1e-6
"""Half the range of a channel that never changes."""

_ZERO = array("i", [0])
_WHOLE = Pages(_ZERO, _ZERO)
"""The pool is one sequence's."""

log = logging.getLogger(__name__)


def find_calibration(path: Path, loaded: Loaded) -> Calibration:
    """What is stored beside the model at `path`, or else found out now, which takes seconds, and stored. So is what an older version
    of the program stored.

    Raises `CalibrationError` if there is a file that is damaged, of a newer version or another model's: it is never replaced in silence.
    """
    stored = calibration_path(path)
    shape = loaded.model.program.shape
    why = "which is done once"
    if stored.exists():
        known = read_calibration(stored, loaded.digest.result(), (loaded.model.program.layers, shape.kv_heads, shape.head_dim))
        if known is not None:
            return known
        why = f"since {stored.name} is of an older version"
    log.warning("calibrating %s, %s", path.name, why)
    found = calibrate(loaded.model, load_tokenizer(path), loaded.pool)
    try:
        write_calibration(stored, found, loaded.digest.result())
    except OSError as error:
        log.warning("the calibration is used, but cannot be kept for the next time: %s", error)
    return found


def calibrate(
    model: Model, tokenizer: Tokenizer, pool: Pool, progress: Callable[[int, int], None] = lambda done, total: None
) -> Calibration:
    """Deterministic for one model, kernel variant and version of Python, whose texts are read.

    progress: is told tokens done and tokens in total.
    """
    texts = [np.array(tokenizer.encode(text, add_special=False), np.int32) for text in calibration_texts().values()]
    start = np.array(tokenizer.encode(""), np.int32)  # what the model expects before a text, such as a begin token
    pieces = spread_pieces(texts, start, model.config.context)
    repeated = repeated_tokens(np.concatenate(texts), start)
    total, done = len(pieces) * ROWS + len(repeated), 0

    def tell(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    tape = Tape(model.program, model.weights, model.vectors, pool, max_rows=ROWS, max_outputs=1, n_frames=frames_for(len(repeated)))
    return Calibration(key_range(tape, pieces, tell), retrieval_scores(tape, model.program, repeated, tell))


def spread_pieces(texts: list[I32], start: I32, context: int) -> list[tuple[int, I32]]:
    """(position, tokens) of pieces of all texts: over each text at even distances, and over the positions that the model knows at
    doubled ones. The rotation turns what is constant in a key, slowest in the channels where most of it is, so that the range at early
    positions is not that at later ones."""
    count = PIECES * len(texts)
    last = max(0, min(context, FARTHEST) - ROWS)
    pieces = []
    for number in range(count):
        text = texts[number % len(texts)]
        begin = number * (len(text) - ROWS) // count
        tokens = np.concatenate([start, text[begin : begin + ROWS - len(start)]])
        position = last >> (count - 1 - number) if number else 0
        pieces.append((position // FRAME * FRAME, tokens))
    return pieces


def key_range(tape: Tape, pieces: list[tuple[int, I32]], tell: Callable[[int], None]) -> KeyCalibration:
    """A piece is a sequence without what comes before it: attention knows distances only."""
    lows, highs = list[F32](), list[F32]()
    for position, tokens in pieces:
        pages = _WHOLE if position == 0 else Pages(array("i", [-1, 0]), array("i", [0, position // FRAME]))
        tape.run(Batch(tokens, [Segment(0, len(tokens), position, (pages,))], _ZERO))
        keys = tape.keys((_WHOLE,), len(tokens))
        lows.append(keys.min(axis=2))
        highs.append(keys.max(axis=2))
        tell(len(tokens))
    low, high = np.min(lows, axis=0), np.max(highs, axis=0)
    return KeyCalibration(np.maximum((high - low) / 2, np.float32(SMALLEST)), (high + low) / 2)


def repeated_tokens(tokens: I32, start: I32) -> I32:
    """Tokens in random order, then some of them again in that order: who guesses the next one must find it in the first place."""
    rng = np.random.default_rng(SEED)
    block = np.concatenate([start, rng.permutation(tokens)[: BLOCK - len(start)]])
    return np.concatenate([block, block[SKIPPED : SKIPPED + REPEATED]])


def retrieval_scores(tape: Tape, program: Program, tokens: I32, tell: Callable[[int], None]) -> F32:
    """For each pair the share of attention that the rows of the second time give to where the tokens and those after them were the
    first time, float32 [layers, kv_heads]; the mean over rows and query heads. Such heads are called induction heads (Olsson et al.,
    2022) or retrieval heads (Wu et al., 2024; DuoAttention, Xiao et al., 2024)."""
    heads = program.layers * program.shape.kv_heads
    found = np.zeros(heads)
    for begin in range(0, len(tokens), ROWS):
        rows = tokens[begin : begin + ROWS]
        if begin < BLOCK:
            tape.run(Batch(rows, [Segment(0, len(rows), begin, (_WHOLE,))], _ZERO))
        else:
            weights = tuple(np.zeros((heads, frames_for(len(tokens))), np.int64) for _ in range(0, len(rows), FRAME))
            segments = [Segment(i * FRAME, FRAME, begin + i * FRAME, (_WHOLE,), weigh=i) for i in range(len(weights))]
            tape.run(Batch(rows, segments, _ZERO, weights))
            for i, weight in enumerate(weights):
                first = (begin - BLOCK + SKIPPED) // FRAME + i
                found += weight[:, first : first + 2].sum(axis=1) / 2.0**32
        tell(len(rows))
    rows_each = REPEATED * program.shape.heads // program.shape.kv_heads
    return (found / rows_each).reshape(program.layers, -1).astype(np.float32)
