"""Log-probabilities, ranks and the lists of likely tokens, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.sampling.sampler import Question, Sampler

VOCABULARIES = (5, 16, 300, 1024, 1025, 49152, 151936)


def log_softmax(logits):
    z = logits.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 10.0, 300.0])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_log_probabilities_are_those_of_float64(pool, vocabulary, spread):
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((4, vocabulary)) * spread + rng.uniform(-50, 50)).astype(np.float32)
    questions = [Question(int(rng.integers(4)), int(rng.integers(vocabulary)), int(rng.integers(0, 6))) for _ in range(12)]
    want = log_softmax(logits)
    for question, answer in zip(questions, Sampler(pool).likelihoods(logits, questions), strict=True):
        row = want[question.row]
        order = np.lexsort((np.arange(vocabulary), -logits[question.row]))
        assert answer.token == question.token
        assert answer.logprob == pytest.approx(row[question.token], abs=1e-5)
        assert answer.rank == int(np.flatnonzero(order == question.token)[0])
        assert [token for token, _ in answer.top] == order[: question.top].tolist()
        assert [logprob for _, logprob in answer.top] == pytest.approx(row[order[: question.top]].tolist(), abs=1e-5)


def test_equal_logits_are_ranked_by_id(pool):
    logits = np.array([[1, 3, 3, 0, 3]], np.float32)
    answers = Sampler(pool).likelihoods(logits, [Question(0, token, 5) for token in range(5)])
    assert [a.rank for a in answers] == [3, 0, 1, 4, 2]
    assert [token for token, _ in answers[0].top] == [1, 2, 4, 0, 3]


def test_impossible_tokens_come_last(pool):
    logits = np.array([[-np.inf, 0, -np.inf, 0]], np.float32)
    impossible, possible = Sampler(pool).likelihoods(logits, [Question(0, 2, 4), Question(0, 3, 0)])
    assert (impossible.logprob, impossible.rank) == (-np.inf, 3)
    assert possible.logprob == pytest.approx(np.log(0.5))
    assert [token for token, _ in impossible.top] == [1, 3, 0, 2]


def test_an_answer_does_not_depend_on_the_other_questions(fast_pool):
    logits = np.random.default_rng(2).standard_normal((3, 500)).astype(np.float32)
    questions = [Question(row, token, top) for row, token, top in ((0, 4, 20), (2, 499, 0), (1, 0, 3), (0, 5, 1))]
    together = Sampler(fast_pool).likelihoods(logits, questions)
    assert [Sampler(fast_pool).likelihoods(logits, [q])[0] for q in questions] == together
    assert [len(a.top) for a in together] == [20, 0, 3, 1]


def test_logits_that_are_no_numbers_neither_crash_nor_hang(pool):
    rng = np.random.default_rng(4)
    for vocabulary in (20, 300, 5000):
        logits = rng.standard_normal((1, vocabulary)).astype(np.float32)
        logits[0, rng.random(vocabulary) < 0.5] = np.nan
        (answer,) = Sampler(pool).likelihoods(logits, [Question(0, 3, 20)])
        numbers = np.flatnonzero(np.isfinite(logits[0]))
        best = numbers[np.argsort(-logits[0, numbers])][: min(20, len(numbers))].tolist()
        assert [token for token, _ in answer.top][: len(best)] == best
