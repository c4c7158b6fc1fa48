"""What a sequence tells the sampler, against the definitions of the penalties."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.core.types import SamplingParams
from tokenmill.sampling.sampler import Draw, Sampler
from tokenmill.sampling.state import SamplerState

PROMPT, OUTPUT = [1, 2, 2], [3, 3, 3, 1]
UNTOUCHED = 9


def greedy(pool, logits, prompt=PROMPT, output=OUTPUT, ends=(), **settings):
    """The likeliest token of 10 after the edits, which is the one way to see them."""
    state = SamplerState(SamplingParams(temperature=0, seed=0, **settings), 0, prompt, ends)
    for token in output:
        state.observe(token)
    return Sampler(pool).sample(np.array([logits], np.float32), [Draw(0, state, len(prompt) + len(output))])[0][0]


def value_of(pool, token, before, **settings):
    """The logit of `token` after the edits, found by bisection against one that is not touched."""
    low, high = -64.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        logits = np.full(10, -1000.0)
        logits[token], logits[UNTOUCHED] = before, middle
        low, high = (middle, high) if greedy(pool, logits, **settings) == token else (low, middle)
    return low


@pytest.mark.parametrize(("token", "after"), [(1, 4 - 1.5), (2, 4), (3, 4 - 1.5), (5, 4)])
def test_presence_counts_output_once(fast_pool, token, after):
    assert value_of(fast_pool, token, 4.0, presence_penalty=1.5) == pytest.approx(after, abs=1e-4)


@pytest.mark.parametrize(("token", "after"), [(1, 4 - 0.5), (2, 4), (3, 4 - 3 * 0.5), (5, 4)])
def test_frequency_counts_each_occurrence_in_the_output(fast_pool, token, after):
    assert value_of(fast_pool, token, 4.0, frequency_penalty=0.5) == pytest.approx(after, abs=1e-4)


@pytest.mark.parametrize(("token", "before", "after"), [(1, 4, 2), (2, 4, 2), (3, 4, 2), (5, 4, 4), (1, -4, -8), (2, -4, -8), (5, -4, -4)])
def test_repetition_divides_or_multiplies_what_prompt_or_output_hold(fast_pool, token, before, after):
    assert value_of(fast_pool, token, before, repetition_penalty=2.0) == pytest.approx(after, abs=1e-4)


def test_repetition_comes_before_the_others_and_bias_last(fast_pool):
    settings = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {3: 10.0}}
    assert value_of(fast_pool, 3, 6.0, **settings) == pytest.approx(6 / 2 - (1 + 3 * 0.5) + 10, abs=1e-4)


def test_a_bias_of_100_is_no_ban_but_an_end_token_before_min_tokens_is(fast_pool):
    logits = [0.0] * 9 + [500.0]
    assert greedy(fast_pool, logits, logit_bias={9: -100.0}) == 9
    assert greedy(fast_pool, logits, ends=(9,), min_tokens=5) == 0
    assert greedy(fast_pool, logits, ends=(9,), min_tokens=5, logit_bias={9: 100.0}) == 0


def test_end_tokens_are_banned_until_min_tokens_exist(fast_pool):
    logits = [0.0] * 9 + [5.0]
    drawn = [greedy(fast_pool, logits, output=[4] * n, ends=(9, 9), min_tokens=3) for n in range(5)]
    assert drawn == [0, 0, 0, 9, 9]


def test_what_no_penalty_counts_is_not_even_looked_at(fast_pool):
    """Tokens outside the vocabulary are refused where a penalty would change their logits, and only there."""
    logits = [0.0] * 9 + [5.0]
    assert greedy(fast_pool, logits, prompt=[10], output=[11]) == 9
    assert greedy(fast_pool, logits, prompt=[10], output=[], presence_penalty=1.0) == 9
    for settings in (
        {"prompt": [10], "repetition_penalty": 2.0},
        {"output": [11], "presence_penalty": 1.0},
        {"output": [-1], "frequency_penalty": 1.0},
    ):
        with pytest.raises(ValueError, match="is outside the vocabulary of 10"):
            greedy(fast_pool, logits, **settings)


@pytest.mark.parametrize("seed", [2**63, 2**63 + 5, 2**64 - 1])
def test_a_negative_seed_is_the_unsigned_one_with_the_same_bits(fast_pool, seed):
    logits = np.zeros((1, 1000), np.float32)
    states = [SamplerState(SamplingParams(seed=s).check(), 0, [0], ()) for s in (seed, seed - 2**64, seed - 2**63)]
    same, negative, other = Sampler(fast_pool).sample(logits, [Draw(0, state, 1) for state in states])
    assert same == negative
    assert same != other
