"""Rejection: whatever is proposed, tokens follow the target's distribution, each given those before it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tokenmill.core.types import SamplingParams
from tokenmill.sampling.sampler import NO_TOKEN, PROPOSING, Draw, Sampler
from tokenmill.sampling.state import SamplerState

N = 200_000
STREAMS = (PROPOSING, 2, 3)
WEIGHTS = np.array([0.25, 0.2, 0.13, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.015, 0.01, 0.006, 0.005, 0.003, 0.001])
LOGITS = np.log(np.random.default_rng(0).permutation(WEIGHTS)).astype(np.float32)
PAIRS = {"opposite": (LOGITS, -LOGITS), "near": (LOGITS, LOGITS * np.float32(0.7) + np.float32(0.3) * np.roll(LOGITS, 1))}


def softmax(logits):
    p = np.exp(logits.astype(np.float64) - logits.max())
    return p / p.sum()


def excess(tokens, p):
    """Chi-squared of tokens against p, over what chance exceeds once in 30,000 times (Wilson and Hilferty 1931).

    What is too rare counts together.
    """
    order = np.argsort(p)[::-1]
    often = max(1, int((p[order] * len(tokens) > 10).sum()))
    found = np.bincount(tokens, minlength=len(p))[order]
    assert not found[p[order] == 0].any(), "a token that the target forbids"
    expected = p[order] * len(tokens)
    if often < len(p):
        found, expected = (np.append(x[:often], x[often:].sum()) for x in (found, expected))
        found, expected = found[expected > 0], expected[expected > 0]
    freedom = max(1, len(expected) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * (2 / (9 * freedom)) ** 0.5) ** 3
    return ((found - expected) ** 2 / expected).sum() / limit


def rejected(pool, target, draft, seed=9, **settings):
    """N trials of one proposed token on rows target and draft, at positions that lie apart, with the row after it."""
    sampler, state = Sampler(pool), SamplerState(SamplingParams(seed=seed, **settings), 0, [0], ())
    proposed = sampler.sample(draft[None], [Draw(0, state, 2 * i) for i in range(N)], PROPOSING)
    draws = [Draw(0, state, 2 * i, token) for i, token in enumerate(proposed)]
    return sampler.reject(np.stack([target, target]), draws, [draft[None]] * N)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_proposed_token_stands_or_is_replaced_as_the_definition_says(oracle, fast_pool, pair):
    target, draft = PAIRS[pair]
    tokens = rejected(fast_pool, target, draft)
    p, q, positions = softmax(target), softmax(draft), 2 * np.arange(N)
    first = np.array([found[0] for found in tokens])
    assert (first != oracle.rejected(p, q, 9, positions, STREAMS)).sum() <= N * 1e-4, "more than float32 explains"
    assert excess(first, p) < 1
    bonus = {i: found[1] for i, found in enumerate(tokens) if len(found) == 2}
    assert len(bonus) / N == pytest.approx(np.minimum(p, q).sum(), abs=0.005)
    where = np.array(list(bonus))
    assert (np.array(list(bonus.values())) == (target + oracle.gumbel(9, 0, positions[where] + 1, 16)).argmax(axis=1)).all()
    assert excess(np.array(list(bonus.values())), p) < 1


@pytest.mark.parametrize("pair", PAIRS)
def test_common_noise_accepts_less_than_rejection_and_more_than_its_bound(fast_pool, pair):
    """(1 - d) / (1 + d) for total variation distance d: Daliri, Musco and Suresh 2024."""
    target, draft = PAIRS[pair]
    state = SamplerState(SamplingParams(seed=3), 0, [0], ())
    one, other = (np.array(Sampler(fast_pool).sample(z[None], [Draw(0, state, i) for i in range(N)])) for z in (target, draft))
    most = np.minimum(softmax(target), softmax(draft)).sum()
    assert most / (2 - most) < (one == other).mean() < 0.97 * most


@pytest.mark.parametrize("streams", [(1, 1, 3), (1, 2, 1), (1, 2, 2), (1, 1, 1)])
def test_a_shared_stream_of_noise_would_be_found(oracle, streams):
    """The definition with one stream for two purposes follows another distribution, which these tests see."""
    worst = {}
    for used in (STREAMS, streams):
        worst[used] = max(excess(oracle.rejected(softmax(t), softmax(d), 9, np.arange(N), used), softmax(t)) for t, d in PAIRS.values())
    assert worst[STREAMS] < 1 < worst[streams]


def joint(oracle, tables, length, params, mask=None):
    """The probability of each sequence, by the product of those of its tokens given what is before. tables: [previous token, token]."""
    vocabulary = len(tables)
    p = np.zeros([vocabulary] * length)
    for tokens in itertools.product(range(vocabulary), repeat=length):
        p[tokens] = 1
        for i, token in enumerate(tokens):
            z = oracle.edited(tables[tokens[i - 1] if i else 0], params, [0], tokens[:i], [])
            if mask is not None:
                z[mask.forbidden(tokens[:i], vocabulary)] = -np.inf
            p[tokens] *= oracle.probabilities(z, params)[token]
    return p.reshape(-1)


def generated(pool, target, draft, n, length, drafted, certain, mask=None, **settings):
    """n sequences as an engine makes them: drafts token by token, verifies, keeps what comes, and drafts again from there.

    Logits depend on the token before: rows of the tables. Returns them as numbers, each token a digit, and the share of drafts that stood.
    """
    sampler, vocabulary, apart = Sampler(pool), len(target), length + drafted + 1
    free = mask is None and not any(settings.get(name) for name in ("presence_penalty", "frequency_penalty"))
    if free:
        states = [SamplerState(SamplingParams(seed=1, **settings), 0, [0], ())] * n
    else:
        masks = [mask and mask(vocabulary) for _ in range(n)]
        states = [SamplerState(SamplingParams(seed=seed, **settings), 0, [0], (), masks[seed]) for seed in range(n)]
    made = [[] for _ in range(n)]
    stood = offered = 0
    while going := [i for i in range(n) if len(made[i]) < length]:
        before = [[made[i][-1] if made[i] else 0] for i in going]
        at = [i * apart * free + len(made[i]) for i in going]
        for j in range(drafted):
            rows = draft[[b[-1] for b in before]]
            found = sampler.sample(rows, [Draw(r, states[i], at[r] + j) for r, i in enumerate(going)], PROPOSING)
            for r, i in enumerate(going):
                token = int(rows[r].argmax()) if certain else found[r][0]
                before[r].append(token)
                states[i].observe(token)
        for b, i in zip(before, going, strict=True):
            for token in reversed(b[1:]):
                states[i].retract(token)
        logits = target[before].reshape(-1, vocabulary)
        draws = [Draw(r * (drafted + 1), states[i], at[r], before[r][1:]) for r, i in enumerate(going)]
        proposals = [None] * len(going) if certain else list(draft[[b[:-1] for b in before]])
        for i, tokens in zip(going, sampler.reject(logits, draws, proposals), strict=True):
            stood += len(tokens) - 1
            offered += drafted
            made[i] += tokens
            for token in tokens:
                states[i].observe(token)
    digits = np.array([tokens[:length] for tokens in made])
    return digits @ vocabulary ** np.arange(length)[::-1], stood / offered


CASES = {
    "two tokens": (2, 3, {}),
    "three tokens": (3, 3, {}),
    "three tokens, cold": (3, 2, {"temperature": 0.5}),
    "three tokens, hot": (3, 1, {"temperature": 1.5, "logit_bias": {1: 1.0}}),
    "filters": (6, 2, {"top_k": 4, "top_p": 0.8, "min_p": 0.05}),
    "penalties": (3, 2, {"presence_penalty": 0.7, "frequency_penalty": 0.6}),
    "repetition": (3, 2, {"repetition_penalty": 2.0, "frequency_penalty": -0.5}),
}


@pytest.mark.parametrize("certain", [False, True], ids=["draft model", "certain"])
@pytest.mark.parametrize("case", CASES)
def test_sequences_follow_the_joint_distribution_of_the_target(oracle, fast_pool, case, certain):
    vocabulary, drafted, settings = CASES[case]
    rng = np.random.default_rng(vocabulary)
    target, draft = rng.standard_normal((2, vocabulary, vocabulary)).astype(np.float32)
    p = joint(oracle, target, 3, SamplingParams(seed=0, **settings))
    found, stood = generated(fast_pool, target, draft, 20_000, 3, drafted, certain, **settings)
    assert excess(found, p) < 1
    assert 0.05 < stood < 0.95


@pytest.mark.parametrize("certain", [False, True], ids=["draft model", "certain"])
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "frequency_penalty": 0.6}], ids=["plain", "filters and penalties"])
def test_sequences_follow_the_joint_distribution_under_a_mask(oracle, turning, fast_pool, settings, certain):
    """What is certain knows nothing of the mask, and may be forbidden."""
    target, draft = np.random.default_rng(6).standard_normal((2, 4, 4)).astype(np.float32)
    p = joint(oracle, target, 3, SamplingParams(seed=0, **settings), turning)
    found, stood = generated(fast_pool, target, draft, 20_000, 3, 2, certain, turning, **settings)
    assert excess(found, p) < 1
    assert 0.05 < stood < 0.95


def test_a_model_of_the_same_mind_is_believed_under_a_mask(turning, fast_pool):
    table = np.random.default_rng(5).standard_normal((4, 4)).astype(np.float32)
    assert generated(fast_pool, table, table, 500, 4, 3, False, turning)[1] == 1


def test_history_is_seen_by_target_and_draft_alike(oracle, fast_pool):
    """The same logits under penalties: everything stands, and yet the joint is not that of independent tokens."""
    table, settings = np.zeros((3, 3), np.float32), {"frequency_penalty": 1.5}
    found, stood = generated(fast_pool, table, table, 5000, 3, 3, False, **settings)
    assert stood == 1
    assert excess(found, joint(oracle, table, 3, SamplingParams(seed=0, **settings))) < 1 < excess(found, np.full(27, 1 / 27))


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.7}, {"top_k": 3, "temperature": 1.4}])
def test_a_proposal_equal_to_the_target_always_stands(pool, settings):
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((5, 1100)).astype(np.float32)
    for seed in range(60):
        state = SamplerState(SamplingParams(seed=seed, **settings), 0, [0], ())
        draft = [token for (token,) in Sampler(pool).sample(logits, [Draw(i, state, 1 + i) for i in range(4)], PROPOSING)]
        ((*stood, _),) = Sampler(pool).reject(logits, [Draw(0, state, 1, draft)], [logits[:4]])
        assert stood == draft


def test_filters_that_leave_nothing_in_common_replace_every_token(fast_pool):
    target, draft = np.sort(LOGITS), np.sort(LOGITS)[::-1].copy()
    tokens = rejected(fast_pool, target, draft, top_k=4)
    p = np.where(np.arange(16) >= 12, softmax(target), 0)
    assert {len(found) for found in tokens} == {1}
    assert excess(np.array(tokens)[:, 0], p / p.sum()) < 1


def test_impossible_proposals_and_what_is_no_number(fast_pool):
    sampler, state = Sampler(fast_pool), SamplerState(SamplingParams(seed=0), 0, [0], ())
    even, broken = np.zeros((2, 4), np.float32), np.full((2, 4), np.nan, np.float32)
    only = np.array([[-np.inf, 0, -np.inf, np.nan]], np.float32)
    assert sampler.reject(broken, [Draw(0, state, 1, [2])], [even[:1]]) == [[NO_TOKEN]]
    seen = set()
    for position in range(200):
        (tokens,) = sampler.reject(even, [Draw(0, state, position, [1])], [only])
        (others,) = sampler.reject(np.concatenate([only, even]), [Draw(0, state, position, [2])], [even[:1]])
        assert others == [1]
        seen.add((tokens[0], len(tokens)))
        for row in (only, broken[:1]):  # what could not have been proposed leaves the target
            assert 0 <= sampler.reject(even, [Draw(0, state, position, [3])], [row])[0][0] < 4
    assert seen == {(0, 1), (1, 2), (2, 1), (3, 1)}


@pytest.mark.parametrize("certain", [False, True])
def test_greedily_the_draft_stands_as_far_as_it_is_the_likeliest(pool, certain):
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((4, 50)).astype(np.float32)
    best = logits.argmax(axis=1).tolist()
    state = SamplerState(SamplingParams(seed=0, temperature=0), 0, [0], ())
    proposal = [None if certain else rng.standard_normal((3, 50)).astype(np.float32)]
    for right in range(4):
        draft = best[:right] + [(token + 1) % 50 for token in best[right:3]]
        assert Sampler(pool).reject(logits, [Draw(0, state, 1, draft)], proposal) == [best[: right + 1]]
