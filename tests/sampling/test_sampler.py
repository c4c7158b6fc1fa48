"""The native sampler against its slow twin: the same token for every row, whatever is asked of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from tokenmill.core.types import SamplingParams
from tokenmill.kernels.native import Pool
from tokenmill.sampling.sampler import NO_TOKEN, Draw, Sampler
from tokenmill.sampling.state import SamplerState

SEEDS = (0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))
REAL_VOCABULARIES = (49152, 151936)


class Case(NamedTuple):
    """One row of logits, what is asked of it, and the tokens that are right."""

    logits: np.ndarray
    params: SamplingParams
    choice: int
    prompt: list[int]
    output: list[int]
    ends: list[int]
    right: set[int]

    @property
    def position(self):
        return len(self.prompt) + len(self.output)

    @property
    def state(self):
        state = SamplerState(self.params, self.choice, self.prompt, self.ends)
        for token in self.output:
            state.observe(token)
        return state


def random_logits(rng, vocabulary):
    z = rng.standard_normal(vocabulary) * 10 ** rng.uniform(-2, 1.5)
    kind = rng.integers(8)
    if kind == 0:
        z = np.round(z)  # ties
    elif kind == 1:
        z = rng.choice([-1.0, 0.0, 2.5], vocabulary)
    elif kind == 2:
        z *= 1e30
    elif kind == 3:
        z *= 1e-30
    elif kind == 4:
        z[rng.random(vocabulary) < rng.random()] = -np.inf
    elif kind == 5:
        z += rng.choice([-1e4, 1e4])
    return z.astype(np.float32)


def random_params(rng, vocabulary):
    def perhaps(value, off):
        return value if rng.random() < 0.4 else off

    penalised = rng.random() < 0.5
    bias = {int(t): float(rng.uniform(-100, 100)) for t in rng.integers(0, vocabulary, rng.integers(0, 4))}
    return SamplingParams(
        temperature=perhaps(float(10 ** rng.uniform(-3, 2)), (0.0, 0.7, 1.0, 1.0)[rng.integers(4)]),
        top_k=perhaps(int(rng.integers(1, vocabulary + 3)), (0, -1)[rng.integers(2)]),
        top_p=perhaps(float(rng.uniform(0.01, 1.0)), 1.0),
        min_p=perhaps(float(10 ** rng.uniform(-4, 0)), 0.0),
        repetition_penalty=perhaps(float(10 ** rng.uniform(-1, 1)), 1.0) if penalised else 1.0,
        presence_penalty=perhaps(float(rng.uniform(-2, 2)), 0.0) if penalised else 0.0,
        frequency_penalty=perhaps(float(rng.uniform(-2, 2)), 0.0) if penalised else 0.0,
        logit_bias=perhaps(bias, {}),
        seed=perhaps(int(rng.integers(2**62)), SEEDS[rng.integers(len(SEEDS))]),
        min_tokens=int(rng.integers(0, 6)),
    ).check(vocabulary)


def random_case(rng, oracle, vocabulary):
    logits, params = random_logits(rng, vocabulary), random_params(rng, vocabulary)
    prompt, output, ends = (rng.integers(0, vocabulary, rng.integers(least, most)).tolist() for least, most in ((1, 20), (0, 12), (0, 4)))
    choice = int(rng.integers(0, 128))
    z = oracle.edited(logits, params, prompt, output, ends)
    right = oracle.tokens(z, params, choice, len(prompt) + len(output)) if np.isfinite(logits.max()) else {NO_TOKEN}
    return Case(logits, params, choice, prompt, output, ends, right)


def sample(pool, cases):
    """All cases of one vocabulary in one call."""
    draws = [Draw(i, case.state, case.position) for i, case in enumerate(cases)]
    return [token for (token,) in Sampler(pool).sample(np.stack([case.logits for case in cases]), draws)]


@pytest.fixture(scope="session")
def small(oracle):
    """60 groups of cases, each of one vocabulary."""
    rng = np.random.default_rng(1)
    return [[random_case(rng, oracle, int(vocabulary)) for _ in range(50)] for vocabulary in rng.integers(5, 301, 60)]


@pytest.fixture(scope="session")
def large(oracle):
    rng = np.random.default_rng(2)
    return [[random_case(rng, oracle, vocabulary) for _ in range(24)] for vocabulary in REAL_VOCABULARIES]


def assert_right(pool, groups):
    for cases in groups:
        for case, token in zip(cases, sample(pool, cases), strict=True):
            assert token in case.right, case._replace(logits=None)


def test_thousands_of_small_cases_give_the_tokens_of_the_definition(pool, small):
    assert_right(pool, small)
    n = sum(map(len, small))
    assert sum(len(case.right) > 1 for cases in small for case in cases) < n / 200, "too often left to rounding"
    assert len({token for cases in small for case in cases for token in case.right}) > 100


def test_vocabularies_of_real_size_give_the_tokens_of_the_definition(pool, large):
    assert_right(pool, large)


@pytest.mark.parametrize("temperature", [1e-3, 0.05, 1.0, 100.0])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 30.0, 1e4])
def test_drawing_from_the_whole_vocabulary_equals_drawing_from_a_list_of_it(pool, temperature, spread):
    """Without filters most tokens are passed over by a bound; top_k = vocabulary looks at each."""
    rng = np.random.default_rng(5)
    for vocabulary in (5, 7, 1023, 1025, 4099):
        logits = (rng.standard_normal((40, vocabulary)) * spread).astype(np.float32)
        logits[20:] = np.round(logits[20:])
        tokens = []
        for top_k in (0, vocabulary):
            params = [SamplingParams(temperature=temperature, seed=seed, top_k=top_k) for seed in range(40)]
            tokens.append(Sampler(pool).sample(logits, [Draw(i, SamplerState(p, 3, [0], ()), 9) for i, p in enumerate(params)]))
        fast, slow = tokens
        assert fast == slow


def test_a_token_depends_on_nothing_but_its_own_row(fast_pool, small):
    rng = np.random.default_rng(3)
    for cases in small[:10]:
        together = sample(fast_pool, cases)
        order = rng.permutation(len(cases))
        assert sample(fast_pool, [cases[i] for i in order]) == [together[i] for i in order]
        assert [sample(Pool(1, fast_pool.variant), [case])[0] for case in cases] == together


def one(pool, logits, **settings):
    row = np.array([logits], np.float32)
    return Sampler(pool).sample(row, [Draw(0, SamplerState(SamplingParams(**{"seed": 0, **settings}), 0, [0], ()), 1)])[0][0]


def test_equal_values_go_to_the_lower_id_when_greedy(pool):
    assert one(pool, [1, 5, 5, 5, 2], temperature=0) == 1
    assert one(pool, [-0.0, 0.0, -1], temperature=0) == 0


def test_equal_values_go_to_the_lower_id_where_top_k_cuts(pool):
    drawn = {one(pool, [3, 1, 3, 3, 3], top_k=2, seed=seed) for seed in range(100)}
    assert drawn == {0, 2}


def test_equal_scores_go_to_the_lower_id(pool):
    """Noise vanishes beside 1e30."""
    assert {one(pool, [0, 1e30, 1e30, 1e30], seed=seed) for seed in range(50)} == {1}
    assert {one(pool, [0, 1e30, 1e30, 1e30], seed=seed, min_p=0.5) for seed in range(50)} == {1}


@pytest.mark.parametrize(("top_p", "count"), [(0.5, 5), (0.51, 6), (0.1, 1), (0.11, 2), (1e-9, 1), (0.99, 10)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(pool, top_p, count):
    assert {one(pool, [0] * 10, top_p=top_p, seed=seed) for seed in range(300)} == set(range(count))


def test_top_p_counts_the_share_among_what_top_k_left(pool):
    """Of ten equal tokens, half of the first four."""
    assert {one(pool, [0] * 10, top_k=4, top_p=0.5, seed=seed) for seed in range(200)} == {0, 1}


def test_min_p_is_a_share_of_the_likeliest_token(pool):
    logits = np.log([0.4, 0.2, 0.2, 0.1, 0.1])
    assert {one(pool, logits, min_p=0.49, seed=seed) for seed in range(200)} == {0, 1, 2}
    assert {one(pool, logits, min_p=1.0, seed=seed) for seed in range(200)} == {0}


def test_filters_see_the_tempered_distribution(pool):
    """At temperature 2 the ratio 1:4 becomes 1:2."""
    logits = np.log([0.8, 0.2])
    assert {one(pool, logits, min_p=0.3, seed=seed) for seed in range(200)} == {0}
    assert {one(pool, logits, min_p=0.3, temperature=2.0, seed=seed) for seed in range(200)} == {0, 1}


def test_a_large_nucleus_over_a_large_vocabulary_is_found(pool):
    """More tokens than the first look takes."""
    drawn = {one(pool, np.zeros(3000), top_p=0.9, seed=seed) for seed in range(400)}
    assert max(drawn) < 2700
    assert len(drawn) > 250


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_logits_that_are_no_numbers_neither_crash_nor_hang(pool, share):
    rng = np.random.default_rng(8)
    for vocabulary in (5, 300, 5000):
        for settings in ({}, {"temperature": 0}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 300, "top_p": 0.5}):
            logits = rng.standard_normal(vocabulary)
            logits[rng.random(vocabulary) < share] = np.nan
            logits[rng.integers(vocabulary)] = 0.0
            assert 0 <= one(pool, logits, **settings) < vocabulary


def test_a_row_without_a_finite_maximum_has_no_token(pool):
    for logits in ([np.inf, 0, np.inf], [-np.inf] * 5, [np.nan] * 40, [np.inf, -np.inf, np.nan, 0]):
        for settings in ({}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {1: 5.0}}):
            assert one(pool, logits, **settings) == NO_TOKEN


def test_a_row_or_a_token_that_does_not_exist_is_refused(fast_pool):
    row, state = np.zeros((1, 5), np.float32), SamplerState(SamplingParams(seed=0), 0, [0], ())
    with pytest.raises(ValueError, match="no such row"):
        Sampler(fast_pool).sample(row, [Draw(1, state, 0)])
    with pytest.raises(ValueError, match="token 5 is outside the vocabulary of 5"):
        one(fast_pool, [0] * 5, logit_bias={5: 1.0})
