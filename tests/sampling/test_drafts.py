"""A draft changes how many tokens a call gives, never which: as drawing one by one, each token observed before the next."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.core.types import SamplingParams
from tokenmill.sampling.sampler import NO_TOKEN, Draw, Sampler
from tokenmill.sampling.state import SamplerState

SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.4, 1.0, 1.5]),
        "top_k": st.sampled_from([0, 0, 1, 3]),
        "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.7, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "logit_bias": st.dictionaries(st.integers(0, 1), st.floats(-5, 5), max_size=2),
        "min_tokens": st.integers(0, 8),
        "seed": st.integers(0, 2**63 - 1),
    }
)


class Wanted(NamedTuple):
    """One sequence: what it has, how many tokens are drafted, and how many of them are right before the first that is not."""

    settings: dict
    choice: int
    prompt: int
    output: int
    drafted: int
    right: int
    broken: int
    """Which of its rows has no finite maximum."""
    masked: bool = False


WANTED = st.builds(
    Wanted,
    SETTINGS,
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(0, 6),
    st.integers(0, 7),
    st.integers(0, 7),
    st.integers(0, 30),
    st.booleans(),
)


class Case(NamedTuple):
    params: SamplingParams
    choice: int
    prompt: list[int]
    output: list[int]
    ends: list[int]
    rows: np.ndarray
    draft: list[int]
    tokens: list[int]
    """What one by one gives."""
    mask: type | None

    def state(self, tokens=()):
        mask = None if self.mask is None else self.mask(self.rows.shape[1])
        state = SamplerState(self.params, self.choice, self.prompt, self.ends, mask)
        for token in [*self.output, *tokens]:
            state.observe(token)
        return state


def case_of(wanted, vocabulary, rng, sampler, mask=None):
    """Draws one by one, each time with a state that has seen nothing but the tokens before, and drafts what comes out or something else."""
    prompt, output, ends = (rng.integers(0, vocabulary, n).tolist() for n in (wanted.prompt, wanted.output, 2))
    rows = (rng.standard_normal((wanted.drafted + 1, vocabulary)) * rng.choice([0.1, 2.0])).astype(np.float32)
    rows[wanted.broken :][:1] = np.nan
    params = SamplingParams(**wanted.settings).check(vocabulary)
    case = Case(params, wanted.choice, prompt, output, ends, rows, [], [], mask if wanted.masked else None)
    for i in range(wanted.drafted + 1):
        ((token,),) = sampler.sample(rows, [Draw(i, case.state(case.tokens), len(prompt) + len(output) + i)])
        case.tokens.append(token)
        if token == NO_TOKEN or i == min(wanted.right, wanted.drafted):
            break
        case.draft.append(token)
    if len(case.draft) < wanted.drafted:
        case.draft.append((case.tokens[-1] + int(rng.integers(1, vocabulary))) % vocabulary)
        case.draft.extend(rng.integers(0, vocabulary, wanted.drafted - len(case.draft)).tolist())
    return case


def draws_of(cases):
    draws, at = [], 0
    for case in cases:
        draws.append(Draw(at, case.state(), len(case.prompt) + len(case.output), case.draft))
        at += len(case.rows)
    return np.concatenate([case.rows for case in cases]), draws


@settings(max_examples=400, deadline=None, derandomize=True)
@given(wanted=st.lists(WANTED, min_size=1, max_size=5), vocabulary=st.sampled_from([2, 3, 16, 300]), seed=st.integers(0, 2**32))
def test_any_draft_gives_the_tokens_that_come_one_by_one(oracle, turning, fast_pool, wanted, vocabulary, seed):
    rng, sampler = np.random.default_rng(seed), Sampler(fast_pool)
    cases = [case_of(w, vocabulary, rng, sampler, turning) for w in wanted]
    logits, draws = draws_of(cases)
    tokens = [case.tokens for case in cases]
    assert sampler.sample(logits, draws) == tokens
    assert sampler.sample(logits, draws) == tokens, "a state has changed"
    for case, draw in zip(cases, draws, strict=True):
        for i, token in enumerate(case.tokens):
            history = case.output + case.tokens[:i]
            z = oracle.edited(case.rows[i], case.params, case.prompt, history, case.ends)
            if case.mask is not None:
                z[case.mask.forbidden(history, vocabulary)] = -np.inf
            if token == NO_TOKEN:
                assert not np.isfinite(case.rows[i].max()) or (case.mask is not None and not np.isfinite(z.max()))
                continue
            assert token in oracle.tokens(z, case.params, case.choice, draw.position + i)


def test_one_thread_and_several_give_the_same_tokens(pool):
    """16 long drafts whose rows are divided among threads; half of them soon wrong."""
    rng, sampler = np.random.default_rng(3), Sampler(pool)
    cases = []
    for seed in range(16):
        wanted = Wanted({"seed": seed, "temperature": 0.8, "top_p": (1.0, 0.9)[seed % 2]}, 0, 3, 2, 30, 30 if seed < 8 else seed - 8, 99)
        cases.append(case_of(wanted, 1000, rng, sampler))
    logits, draws = draws_of(cases)
    for _ in range(50):
        assert sampler.sample(logits, draws) == [case.tokens for case in cases]
    assert [len(case.tokens) for case in cases] == [31] * 8 + [*range(1, 9)]


def test_streams_of_noise_differ_and_are_those_of_the_definition(oracle, fast_pool):
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((40, 100)).astype(np.float32)
    params = SamplingParams(seed=5)
    draws = [Draw(i, SamplerState(params, 2, [0], ()), i) for i in range(40)]
    found = [Sampler(fast_pool).sample(logits, draws, stream) for stream in (0, 1, 2**32 - 1)]
    for stream, tokens in zip((0, 1, 2**32 - 1), found, strict=True):
        assert all(token in oracle.tokens(logits[i], params, 2, i, stream) for i, (token,) in enumerate(tokens))
    assert found[0] != found[1] != found[2] != found[0]


@given(
    history=st.lists(st.integers(0, 7), max_size=6),
    steps=st.lists(st.one_of(st.integers(0, 7), st.none()), max_size=30),
    used=SETTINGS,
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_is_taken_back_leaves_no_trace(fast_pool, history, steps, used):
    """steps: tokens that are observed, and None where the latest of them is taken back. Tokens 0 to 3 are in the prompt."""
    params, prompt = SamplingParams(**used), [0, 1, 1, 2, 3]
    state = SamplerState(params, 0, prompt, [6])
    for token in history:
        state.observe(token)
    ahead: list[int] = []
    for token in steps:
        if token is not None:
            state.observe(token)
            ahead.append(token)
        elif ahead:
            state.retract(ahead.pop())
    fresh = SamplerState(params, 0, prompt, [6])
    for token in history + ahead:
        fresh.observe(token)
    probe = np.random.default_rng(1).standard_normal((30, 8)).astype(np.float32)
    mine, wanted = (Sampler(fast_pool).sample(probe, [Draw(i, s, i) for i in range(30)]) for s in (state, fresh))
    assert mine == wanted


def test_tokens_can_be_taken_back_in_any_order(fast_pool):
    """Greedily, from equal logits: what was never put out is the likeliest, then what was put out least."""
    state = SamplerState(SamplingParams(temperature=0, seed=0, frequency_penalty=1.0), 0, [0], ())
    for token in (0, 1, 2, 2, 3):
        state.observe(token)
    found = []
    for token in (1, 3, 2, 0, 2):
        state.retract(token)
        ((best,),) = Sampler(fast_pool).sample(np.zeros((1, 4), np.float32), [Draw(0, state, 0)])
        found.append(best)
    assert found == [1, 1, 1, 0, 0]


def test_what_was_not_observed_cannot_be_taken_back():
    state = SamplerState(SamplingParams(seed=0, repetition_penalty=2.0), 0, [3], ())
    with pytest.raises(ValueError, match="token 3 was not observed"):
        state.retract(3)
    state.observe(4)
    with pytest.raises(ValueError, match="token 5 was not observed"):
        state.retract(5)
    with pytest.raises(ValueError, match="token 5 was not observed"):
        SamplerState(SamplingParams(seed=0), 0, [3], ()).retract(5)


def test_a_mask_holds_where_nothing_else_is_left(fast_pool, turning):
    """Rather no token than one that it forbids: the end is banned, and the only other one is not allowed."""
    state = SamplerState(SamplingParams(seed=0, min_tokens=5), 0, [0], [1], turning(2))
    draws = [Draw(0, state, 1)]
    assert Sampler(fast_pool).sample(np.zeros((1, 2), np.float32), draws) == [[NO_TOKEN]]
    assert Sampler(fast_pool).reject(np.zeros((2, 2), np.float32), [Draw(0, state, 1, [1])], [None]) == [[NO_TOKEN]]


def test_a_mask_of_another_vocabulary_is_refused(fast_pool, turning):
    draws = [Draw(0, SamplerState(SamplingParams(seed=0), 0, [0], (), turning(32)), 1, [1])]
    assert len(Sampler(fast_pool).sample(np.zeros((2, 32), np.float32), draws)) == 1
    with pytest.raises(ValueError, match="a bit for each token of the vocabulary"):
        Sampler(fast_pool).sample(np.zeros((2, 33), np.float32), draws)


def test_a_draft_that_does_not_fit_is_refused(fast_pool):
    logits, sampler = np.zeros((3, 5), np.float32), Sampler(fast_pool)
    free, bound = (SamplerState(SamplingParams(seed=0, presence_penalty=p), 0, [0], ()) for p in (0.0, 1.0))
    for message, draws in {
        "no such row of logits: 1 and 2 for its draft, of 3": [Draw(1, free, 0, [1, 2])],
        "no such row of logits: -1": [Draw(-1, free, 0, [1, 2])],
        "token 5 is outside the vocabulary of 5": [Draw(0, free, 0, [1, 5])],
        "token -1 is outside": [Draw(0, free, 0, [NO_TOKEN])],
        "shares its state": [Draw(0, bound, 0, [1]), Draw(2, bound, 2)],
    }.items():
        with pytest.raises(ValueError, match=message):
            sampler.sample(logits, draws)
        with pytest.raises(ValueError, match=message):
            sampler.reject(logits, draws, [None] * len(draws))
    assert len(sampler.sample(logits, [Draw(0, free, 0, [1]), Draw(2, free, 2)])) == 2
    proposals = {"a row of the vocabulary for each": [logits, logits[:2, :4], logits[:0]], "lists differ": []}
    for message, wrong in proposals.items():
        for proposal in [[w] for w in wrong] or [[]]:
            with pytest.raises(ValueError, match=message):
                sampler.reject(logits, [Draw(0, free, 0, [1, 2])], proposal)
