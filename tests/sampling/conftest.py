"""The slow twin of native/src/sample.cpp: docs/sampling.md in NumPy and float64, with its own generator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from tokenmill.core.types import SamplingParams
from tokenmill.kernels.native import Pool, variants
from tokenmill.sampling.sampler import Draw, Sampler
from tokenmill.sampling.state import SamplerState

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
ROUNDING = 1e-12
"""Relative distance within which two correct implementations in float64 may disagree."""


class Oracle:
    """Everything by definition, one row at a time."""

    @staticmethod
    def philox(seed: int, counter: Sequence[U64 | int]) -> list[U64]:
        """Philox4x32-10 (Salmon et al. 2011): four words for each counter of four words under a 64-bit key."""
        x = [np.asarray(c, np.uint64) for c in counter]
        keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
        for _ in range(10):
            a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
            x = [(b >> HALF) ^ x[1] ^ np.uint64(keys[0]), b & LOW, (a >> HALF) ^ x[3] ^ np.uint64(keys[1]), a & LOW]
            keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
        return x

    @classmethod
    def uniform(cls, seed: int, choice: int, position: npt.ArrayLike, n: int, stream: int = 0) -> F64:
        """A number in (0, 1) for each of tokens 0 … n - 1; a row of them for each position, if there are several."""
        blocks = np.arange((n + 3) // 4, dtype=np.uint64)
        words = cls.philox(seed, [blocks, np.asarray(position, np.uint64)[..., None], choice, stream])
        fours = np.stack(np.broadcast_arrays(*words), axis=-1)
        return (fours.reshape(*fours.shape[:-2], -1)[..., :n].astype(np.float64) + 0.5) * 2.0**-32

    @classmethod
    def gumbel(cls, seed: int, choice: int, position: npt.ArrayLike, n: int, stream: int = 0) -> F64:
        return -np.log(-np.log(cls.uniform(seed, choice, position, n, stream)))

    @staticmethod
    def edited(logits: F32, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], ends: Sequence[int]) -> F32:
        """Repetition, presence and frequency penalties, bias, bans."""
        z = logits.astype(np.float32)
        for token in {*prompt, *output}:
            if params.repetition_penalty != 1:
                penalty = np.float32(params.repetition_penalty)
                z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
            if token in output:
                count = np.float32(list(output).count(token))
                z[token] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * count
        for token, bias in params.logit_bias.items():
            z[token] += np.float32(bias)
        if len(output) < params.min_tokens:
            z[list(ends)] = -np.inf
        return z

    @staticmethod
    def kept(z: F32, params: SamplingParams, slack: float = 0.0) -> npt.NDArray[np.int64]:
        """The tokens that survive the filters, likeliest first. `slack` moves every threshold by that factor."""
        order = np.lexsort((np.arange(len(z)), -z.astype(np.float64)))
        if params.top_k > 0:
            order = order[: params.top_k]
        weights = np.exp2((z[order].astype(np.float64) - float(z[order[0]])) / params.temperature * np.log2(np.e))
        if params.top_p < 1:
            total = np.cumsum(weights[np.argsort(order)] if params.top_k <= 0 else weights)[-1]
            enough = np.cumsum(weights) >= params.top_p * total * (1 + slack)
            count = int(np.argmax(enough)) + 1 if enough.any() else len(order)
            order, weights = order[:count], weights[:count]
        return order[weights >= params.min_p * (1 + slack)]

    @classmethod
    def probabilities(cls, z: F32, params: SamplingParams) -> F64:
        """What is drawn from, of edited logits, at a temperature above 0."""
        kept = cls.kept(z, params)
        p = np.zeros(len(z))
        p[kept] = np.exp((z[kept].astype(np.float64) - float(z[kept[0]])) / params.temperature)
        return p / p.sum()

    @classmethod
    def tokens(cls, z: F32, params: SamplingParams, choice: int, position: int, stream: int = 0) -> set[int]:
        """The token of edited logits; more than one where rounding may decide."""
        if params.temperature == 0 or not np.isfinite(z).any():
            return {int(np.argmax(z))}
        assert params.seed is not None
        noise = cls.gumbel(params.seed, choice, position, len(z), stream)
        right = set()
        for slack in (-ROUNDING, 0.0, ROUNDING):
            kept = np.sort(cls.kept(z, params, slack))
            scores = z[kept].astype(np.float64) / params.temperature + noise[kept]
            best = scores.max()
            right |= set(kept[(scores >= best - ROUNDING * max(1.0, abs(best))) & (z[kept] != z[kept[scores.argmax()]])].tolist())
            right.add(int(kept[scores.argmax()]))
        return right

    @classmethod
    def rejected(cls, p: F64, q: F64, seed: int, positions: npt.NDArray[np.int64], streams: tuple[int, int, int]) -> npt.NDArray[np.int64]:
        """A token for each position: one of q is proposed, and stands or is replaced. streams: of proposing, accepting, replacing."""
        proposing, accepting, replacing = streams
        with np.errstate(divide="ignore"):
            proposed = (np.log(q) + cls.gumbel(seed, 0, positions, len(q), proposing)).argmax(axis=1)
        stands = cls.uniform(seed, 0, positions, 1, accepting)[:, 0] * q[proposed] < p[proposed]
        left = np.cumsum(np.maximum(p - q, 0))
        others = np.searchsorted(left, cls.uniform(seed, 0, positions, 1, replacing)[:, 0] * left[-1], side="right")
        return np.where(stands, proposed, others)


class Turning:
    """A mask that forbids one token, another after each that comes, by all of those."""

    def __init__(self, vocabulary: int) -> None:
        self.seen: list[int] = []
        self._vocabulary = vocabulary

    @staticmethod
    def forbidden(seen: Sequence[int], vocabulary: int) -> int:
        return (sum(seen) + len(seen)) % vocabulary

    def allowed(self) -> npt.NDArray[np.uint32]:
        bits = np.ones((self._vocabulary + 31) // 32 * 32, np.uint8)
        bits[self.forbidden(self.seen, self._vocabulary)] = 0
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def observe(self, token: int) -> None:
        self.seen.append(token)

    def retract(self, token: int) -> None:
        assert self.seen.pop() == token, "what was not observed last is taken back"


@pytest.fixture(scope="session")
def turning() -> type[Turning]:
    return Turning


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    return Oracle


@pytest.fixture(scope="session", params=variants())
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(2, request.param)


@pytest.fixture(scope="session")
def fast_pool() -> Pool:
    """The fastest variant only."""
    return Pool(2)


class ManyDraws:
    """The native sampler on one row of logits, many times over."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def __call__(
        self,
        logits: F32,
        *,
        seed: npt.ArrayLike = 0,
        choice: npt.ArrayLike = 0,
        position: npt.ArrayLike = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> npt.NDArray[np.int32]:
        """One token for each of the broadcast seeds, choices and positions. logits: float32 [vocabulary]."""
        seeds, choices, positions = np.broadcast_arrays(seed, choice, position)
        row = np.ascontiguousarray(logits, np.float32)[None]
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        keys = list(zip(seeds.reshape(-1).tolist(), choices.reshape(-1).tolist(), strict=True))
        states = {(s, c): SamplerState(SamplingParams(seed=s, **settings), c, [0], ()) for s, c in set(keys)}
        draws = [Draw(0, states[key], p) for key, p in zip(keys, positions.reshape(-1).tolist(), strict=True)]
        return np.array(Sampler(self.pool).sample(row, draws), np.int32).reshape(-1)


@pytest.fixture(scope="session")
def many_draws(fast_pool: Pool) -> ManyDraws:
    return ManyDraws(fast_pool)
