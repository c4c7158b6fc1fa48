"""The noise is what it claims to be: sampled tokens follow the softmax, independently from each other."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill import _native

N = 200_000
PROBABILITIES = np.array([0.25, 0.2, 0.13, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.015, 0.01, 0.006, 0.005, 0.003, 0.001])
LOGITS = np.log(PROBABILITIES).astype(np.float32)
COUNT = np.arange(N)

AXES = {
    "seeds": {"seed": COUNT, "choice": 3, "position": 17},
    "far seeds": {"seed": COUNT << 40, "choice": 0, "position": 1},
    "positions": {"seed": 42, "position": COUNT},
    "choices": {"seed": 7, "choice": COUNT},
}
HALF = COUNT[: N // 2]
NEIGHBOURS = {
    "seeds": ({"seed": HALF}, {"seed": HALF + 1}),
    "positions": ({"position": HALF}, {"position": HALF + 1}),
    "choices": ({"seed": HALF, "choice": 0}, {"seed": HALF, "choice": 1}),
    "position and choice": ({"seed": HALF, "choice": 1, "position": 0}, {"seed": HALF, "choice": 0, "position": 1}),
}


def limit(freedom):
    """The chi-squared value that chance exceeds once in 30,000 times (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4 * (2 / (9 * freedom)) ** 0.5) ** 3


def assert_distributed(tokens, probabilities):
    expected = probabilities * len(tokens)
    found = np.bincount(tokens, minlength=len(expected))
    assert ((found - expected) ** 2 / expected).sum() < limit(len(expected) - 1)


def assert_independent(a, b):
    """a, b: labels of pairs; every label is frequent enough for the test."""
    table = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(table, (a, b), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / len(a)
    assert expected.min() > 5
    assert ((table - expected) ** 2 / expected).sum() < limit((table.shape[0] - 1) * (table.shape[1] - 1))


@pytest.mark.parametrize("axis", AXES)
def test_tokens_follow_the_softmax_along(many_draws, axis):
    assert_distributed(many_draws(LOGITS, **AXES[axis]), PROBABILITIES)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(many_draws, temperature):
    wanted = PROBABILITIES ** (1 / temperature)
    tokens = many_draws(LOGITS, position=COUNT, temperature=temperature)
    kept = np.minimum(tokens, 9)  # the rare ones together
    wanted /= wanted.sum()
    assert_distributed(kept, np.append(wanted[:9], wanted[9:].sum()))


def test_what_a_filter_leaves_is_drawn_in_proportion(many_draws):
    left = {
        (0, 1, 2, 3): many_draws(LOGITS, position=COUNT, top_k=4),
        (0, 1, 2): many_draws(LOGITS, position=COUNT, top_p=0.5),
        (0, 1, 2, 3, 4, 5, 6): many_draws(LOGITS, position=COUNT, min_p=0.19),
        (0, 1): many_draws(LOGITS, position=COUNT, top_k=4, top_p=0.6),
    }
    for kept, tokens in left.items():
        probabilities = PROBABILITIES[list(kept)]
        assert_distributed(tokens, probabilities / probabilities.sum())


def test_a_large_vocabulary_is_drawn_evenly_over_its_ids(many_draws):
    """Chunks and quads of the fast path leave no trace."""
    tokens = many_draws(np.zeros(5003, np.float32), seed=COUNT[:40_000])
    assert_distributed(tokens % 4, np.bincount(np.arange(5003) % 4) / 5003)
    assert_distributed(tokens // 1024, np.bincount(np.arange(5003) // 1024) / 5003)


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_neighbouring_draws_are_independent(many_draws, neighbours):
    one, other = (np.minimum(many_draws(LOGITS, **where), 9) for where in NEIGHBOURS[neighbours])
    assert_independent(one, other)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (3, 4), (1, 2), (0, 1000), (8, 4096)])
def test_the_noise_of_different_tokens_is_independent(one, other):
    def eighths(token):
        noise = np.array([_native.gumbel(seed, 0, 5, token) for seed in range(N // 2)])
        return (np.exp(-np.exp(-noise)) * 8).astype(int)

    assert_independent(eighths(one), eighths(other))


def test_the_noise_is_standard_gumbel():
    """Kolmogorov and Smirnov: exp(-exp(-x)) of it is uniform."""
    u = np.sort(np.exp(-np.exp(-np.array([_native.gumbel(3, 0, i, 9) for i in range(N)]))))
    distance = max(np.abs(u - np.arange(N) / N).max(), np.abs(u - np.arange(1, N + 1) / N).max())
    assert distance < 2.3 / N**0.5


def test_the_noise_is_that_of_the_definition(oracle):
    for where in ((0, 0, 0, 0), (1, 2, 3, 1), (2**64 - 1, 127, 2**24, 3), (0x0123456789ABCDEF, 5, 4096, 2**32 - 1)):
        noise = oracle.gumbel(*where[:3], 999, where[3])
        np.testing.assert_allclose([_native.gumbel(*where[:3], t, where[3]) for t in range(999)], noise, rtol=1e-13, atol=1e-14)


def test_the_generator_is_philox(oracle):
    """Known answers of the authors' Random123 library for philox4x32-10."""
    ones = 2**32 - 1
    known = [
        (0, [0, 0, 0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (2**64 - 1, [ones] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x299F31D0A4093822,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for key, counter, words in known:
        assert [int(w) for w in oracle.philox(key, counter)] == words
