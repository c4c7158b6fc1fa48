from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.measure.workload import SHAREGPT_OUTPUT, SHAREGPT_PROMPT, Ask, Lengths, Workload, arrivals, text_of

FEW, SOME = Lengths(3, 3), Lengths(2, 9)


def first(n: int, work: Workload) -> list[Ask]:
    return list(itertools.islice(work.asks(), n))


def test_poisson_arrivals_have_the_rate_and_memoryless_gaps() -> None:
    times = list(itertools.islice(arrivals(5.0, np.random.default_rng(1)), 20_000))
    gaps = np.diff([0.0, *times])
    assert (gaps > 0).all()
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert np.std(gaps) == pytest.approx(0.2, rel=0.03)  # of an exponential distribution: its mean
    per_second = np.bincount(np.array(times, int))[:-1]
    assert np.var(per_second) == pytest.approx(np.mean(per_second), rel=0.1)  # of a Poisson distribution: equal
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03


def test_the_sharegpt_like_mix_has_its_medians_means_and_bounds() -> None:
    rng = np.random.default_rng(2)
    for lengths, median, mean in ((SHAREGPT_PROMPT, 90, 188), (SHAREGPT_OUTPUT, 140, 224)):
        drawn = [lengths.draw(rng) for _ in range(20_000)]
        assert statistics.median(drawn) == pytest.approx(median, rel=0.05)
        assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
        assert min(drawn) == 4
        assert max(drawn) == 1024


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("17", Lengths(17, 17)), ("8-16", Lengths(8, 16)), ("sharegpt", SHAREGPT_PROMPT)],
)
def test_lengths_are_read_as_typed(text: str, lengths: Lengths) -> None:
    assert Lengths.parse(text, "--prompt-tokens", SHAREGPT_PROMPT) == lengths


@pytest.mark.parametrize("text", ["", "0", "9-3", "-4", "x", "4-", "sharegp", "1.5", "99999999"])
def test_bad_lengths_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--prompt-tokens is '.*LOW-HIGH"):
        Lengths.parse(text, "--prompt-tokens", SHAREGPT_PROMPT)


def test_uniform_lengths_reach_both_ends() -> None:
    rng = np.random.default_rng(3)
    assert {Lengths(8, 11).draw(rng) for _ in range(200)} == {8, 9, 10, 11}


def test_one_seed_makes_one_workload_and_another_another() -> None:
    work = Workload(SHAREGPT_PROMPT, SHAREGPT_OUTPUT, seed=4, rate=2.0)
    assert first(20, work) == first(20, work)
    assert first(20, work) != first(20, Workload(SHAREGPT_PROMPT, SHAREGPT_OUTPUT, seed=5, rate=2.0))


def test_the_rate_leaves_the_requests_as_they_are() -> None:
    slow, fast = (Workload(SOME, SOME, seed=4, rate=rate) for rate in (1.0, 8.0))
    closed = Workload(SOME, SOME, seed=4)
    requests = [[(ask.prompt, ask.max_tokens) for ask in first(30, work)] for work in (slow, fast, closed)]
    assert requests[0] == requests[1] == requests[2]
    assert [ask.at for ask in first(30, slow)] == pytest.approx([8 * ask.at for ask in first(30, fast)])
    assert {ask.at for ask in first(30, closed)} == {0.0}


def test_prompts_of_a_group_share_a_prefix_of_the_length_asked_for() -> None:
    asks = first(40, Workload(FEW, FEW, seed=6, shared_prefix=20, prefix_groups=3))
    words = [ask.prompt.split(" ") for ask in asks]
    assert {len(prompt) for prompt in words} == {23}
    assert len({tuple(prompt[:20]) for prompt in words}) == 3
    assert len({tuple(prompt[20:]) for prompt in words}) > 30


def test_a_text_has_as_many_words_as_tokens_were_asked_for() -> None:
    assert len(text_of(100, np.random.default_rng(0)).split(" ")) == 100
