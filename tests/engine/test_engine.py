"""What an engine does with a request, on the real SmolLM2."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.core.errors import ContextLengthExceeded, InvalidRequest
from tokenmill.core.messages import Generate
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.runner import MAX_OUTPUTS

PROMPT = [504, 3575, 282, 4649, 314]  # The capital of France is
LONG = np.random.default_rng(7).integers(100, 40000, 700).tolist()
LENGTH, STOP, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT


def test_a_request_ends_at_max_tokens(talk):
    for n in (1, 2, 9):
        answer = talk.ask(PROMPT, max_tokens=n)
        assert (len(answer.tokens), answer.finish_reason, answer.stop_token) == (n, LENGTH, None)


def test_every_step_adds_one_token_to_a_sequence(talk):
    talk.add("a", PROMPT, max_tokens=5)
    counts = []
    while talk.engine.has_work:
        counts += [len(output.tokens) for output in talk.step()]
    assert counts == [1] * 5
    talk.finish()


def test_a_shorter_answer_is_the_beginning_of_a_longer_one(talk):
    longest = talk.ask(PROMPT, max_tokens=12, temperature=1.0, seed=4).tokens
    assert [talk.ask(PROMPT, max_tokens=n, temperature=1.0, seed=4).tokens for n in (1, 5)] == [longest[:1], longest[:5]]


def test_an_end_token_ends_a_sequence_and_is_told(talk):
    free = talk.ask(PROMPT).tokens
    at = free.index(free[3])
    for settings in ({"eos": (free[3], 5)}, {"stop_token_ids": (7, free[3])}):
        answer = talk.ask(PROMPT, **settings)
        assert (answer.tokens, answer.finish_reason, answer.stop_token) == (free[: at + 1], STOP, free[3])


def test_an_end_token_as_last_allowed_token_is_a_stop(talk):
    free = talk.ask(PROMPT).tokens
    answer = talk.ask(PROMPT, eos=(free[0],), max_tokens=1)
    assert (answer.finish_reason, answer.stop_token) == (STOP, free[0])


def test_ignore_eos_ignores_eos_but_not_stop_tokens(talk):
    free = talk.ask(PROMPT).tokens
    assert talk.ask(PROMPT, eos=(free[1],), ignore_eos=True).tokens == free
    answer = talk.ask(PROMPT, eos=(free[1],), ignore_eos=True, stop_token_ids=(free[4],))
    assert answer.tokens == free[: free.index(free[4]) + 1]


def test_min_tokens_forbids_end_tokens_until_then(talk):
    free = talk.ask(PROMPT).tokens
    answer = talk.ask(PROMPT, eos=(free[0],), stop_token_ids=(free[1],), min_tokens=6)
    assert not {free[0], free[1]} & set(answer.tokens[:6])
    assert talk.ask(PROMPT, eos=(free[0],), min_tokens=0).tokens == free[:1]
    assert talk.ask(PROMPT, eos=(free[0],), ignore_eos=True, min_tokens=6).tokens == free, "an ignored end token is not forbidden"


def test_an_end_token_that_the_model_does_not_have_never_comes(talk):
    free = talk.ask(PROMPT).tokens
    assert talk.ask(PROMPT, eos=(49152, 2**31, -1), min_tokens=4).tokens == free


def test_choices_differ_and_the_first_is_the_lone_answer(talk):
    alone = talk.ask(PROMPT, temperature=1.0, seed=11)
    talk.add("n", PROMPT, temperature=1.0, seed=11, n=4)
    answers = talk.finish()
    assert sorted(choice for _, choice in answers) == [0, 1, 2, 3]
    assert answers["n", 0].tokens == alone.tokens
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 4


def test_greedy_choices_are_alike(talk):
    talk.add("n", PROMPT, n=3)
    assert len({tuple(answer.tokens) for answer in talk.finish().values()}) == 1


def test_seeds_decide(talk):
    one, two, again = (talk.ask(PROMPT, temperature=1.0, seed=seed).tokens for seed in (1, 2, 1))
    assert one == again != two


@pytest.mark.parametrize("top", [0, 1, 20])
def test_log_probabilities_come_with_every_token(talk, top):
    answer = talk.ask(PROMPT, logprobs=top, max_tokens=4)
    assert [found.token for found in answer.logprobs] == answer.tokens
    for found in answer.logprobs:
        assert len(found.top) == top
        assert [lp for _, lp in found.top] == sorted((lp for _, lp in found.top), reverse=True)
        assert (found.rank, found.logprob) == (0, found.top[0][1] if top else found.logprob)
        assert sum(np.exp(lp) for _, lp in found.top) < 1.0001
    assert answer.prompt_logprobs is None


def test_log_probabilities_are_the_models_own_whatever_shapes_the_choice(talk):
    plain = talk.ask(PROMPT, logprobs=3, max_tokens=1).logprobs[0]
    biased = talk.ask(PROMPT, logprobs=3, max_tokens=1, temperature=0.1, top_k=5, logit_bias={300: 100.0}, repetition_penalty=1.5)
    assert biased.tokens == [300]
    assert biased.logprobs[0].top == plain.top
    assert biased.logprobs[0].rank > 0


def test_nothing_is_said_of_likelihood_unless_asked(talk):
    answer = talk.ask(PROMPT)
    assert answer.logprobs == []
    assert answer.prompt_logprobs is None


@pytest.mark.parametrize("length", [1, 2, MAX_OUTPUTS, MAX_OUTPUTS + 1, 512, 513, 700])
def test_prompt_log_probabilities_of_any_length(talk, length):
    answer = talk.ask(LONG[:length], prompt_logprobs=2, max_tokens=1)
    first, *rest = answer.prompt_logprobs
    assert first is None
    assert [found.token for found in rest] == LONG[1:length]
    assert all(len(found.top) == 2 and found.logprob <= found.top[0][1] for found in rest)


def test_prompt_log_probabilities_are_those_of_decoding(talk):
    """The tokens of an answer, given back as a prompt, have the same log-probabilities to the last bit."""
    answer = talk.ask(LONG[:70], max_tokens=70, logprobs=4, temperature=1.0, ignore_eos=True)
    forced = talk.ask(LONG[:70] + answer.tokens, max_tokens=1, prompt_logprobs=4)
    assert forced.prompt_logprobs[70:] == answer.logprobs


def test_prompt_log_probabilities_come_with_the_first_token_only(talk):
    talk.add("a", PROMPT, prompt_logprobs=0, n=2, max_tokens=3)
    told = []
    while talk.engine.has_work:
        told += [(len(output.tokens), len(output.prompt_logprobs or [])) for output in talk.step()]
    talk.finish()
    assert told == [(1, 5)] * 2 + [(1, 0)] * 4


def test_a_repeated_prompt_is_found_in_the_cache(talk):
    prompt = [9, 9, *LONG[:62]]
    first, again = talk.ask(prompt), talk.ask(prompt)
    assert (first.cached_tokens, again.cached_tokens) == (0, 56)
    assert first.tokens == again.tokens
    assert talk.ask(prompt, prompt_logprobs=0).cached_tokens == 0, "prompt log-probabilities need every position"


def test_a_salt_keeps_prompts_apart(talk):
    prompt = [8, 8, *LONG[:62]]

    def cached(salt):
        request = Generate(request_id="a", prompt=prompt, params=SamplingParams(max_tokens=1, seed=0), cache_salt=salt)
        talk.engine.add(request)
        return talk.finish()["a", 0].cached_tokens

    assert [cached(salt) for salt in ("one", "two", "one")] == [0, 0, 56]


@pytest.mark.parametrize(("state", "steps", "tokens"), [("waiting", 0, 0), ("prefilling", 1, 0), ("prefilling", 2, 0), ("decoding", 5, 3)])
def test_an_aborted_request_ends_with_the_next_step(talk, state, steps, tokens):
    prompt = [steps, *LONG[:600]]  # two chunks
    talk.add("a", prompt, max_tokens=50)
    for _ in range(steps):
        talk.step()
    stats = talk.engine.stats()
    assert (stats.waiting, stats.running) == ((1, 0) if state == "waiting" else (0, 1))
    talk.engine.abort("a")
    talk.engine.check_integrity()
    assert talk.engine.stats().kv_held == 0
    assert talk.engine.has_work, "the last output is still to come"
    answer = talk.finish()["a", 0]
    assert (len(answer.tokens), answer.finish_reason) == (tokens, ABORT)
    assert talk.step() == []


def test_one_choice_can_be_aborted(talk):
    talk.add("a", PROMPT, n=3, max_tokens=6, temperature=1.0)
    talk.step()
    talk.engine.abort("a", 1)
    answers = talk.finish()
    assert {choice: answer.finish_reason for (_, choice), answer in answers.items()} == {0: LENGTH, 1: ABORT, 2: LENGTH}
    talk.add("a", PROMPT, n=3, max_tokens=6, temperature=1.0)
    whole = talk.finish()
    assert [whole["a", c].tokens == answers["a", c].tokens for c in range(3)] == [True, False, True]


def test_an_abort_says_why(talk):
    talk.add("a", PROMPT)
    talk.engine.abort("a", reason=STOP)
    assert talk.finish()["a", 0].finish_reason == STOP


def test_aborting_what_is_unknown_or_over_changes_nothing(talk):
    talk.ask(PROMPT)
    talk.engine.abort("alone")
    talk.engine.abort("never")
    talk.add("a", PROMPT, n=2)
    talk.engine.abort("a", 7)
    assert {a.finish_reason for a in talk.finish().values()} == {LENGTH}
    assert not talk.engine.has_work
    assert talk.step() == []


def test_a_request_is_aborted_among_others(talk):
    alone = talk.ask(PROMPT, max_tokens=10).tokens
    for name in "abc":
        talk.add(name, PROMPT, max_tokens=10)
    talk.step()
    talk.engine.abort("b")
    answers = talk.finish()
    assert answers["a", 0].tokens == answers["c", 0].tokens == alone


def test_an_id_in_use_is_refused_as_long_as_any_choice_lives(talk):
    talk.add("a", PROMPT, n=2)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="request id 'a' belongs to a request that is being served"):
            talk.add("a", PROMPT, n=2)
        talk.engine.abort("a", 0)
    answers = talk.finish()
    assert [answers["a", c].finish_reason for c in range(2)] == [ABORT, LENGTH]
    talk.add("a", PROMPT)
    assert talk.finish()["a", 0].finish_reason == LENGTH


@pytest.mark.parametrize(("beyond", "max_tokens"), [(-3, 4), (0, 1), (50, 1)])
def test_a_request_beyond_the_context_is_refused_with_both_numbers(talk, beyond, max_tokens):
    limit = talk.engine.info.max_model_len
    with pytest.raises(ContextLengthExceeded) as refusal:
        talk.add("a", [1] * (limit + beyond), max_tokens=max_tokens)
    assert str(limit + beyond) in str(refusal.value)
    assert str(limit) in str(refusal.value)
    assert refusal.value.code == "context_length_exceeded"
    assert not talk.engine.has_work


@pytest.mark.parametrize("token", [-1, 49152, 2**31, 2**40])
def test_a_prompt_outside_the_vocabulary_is_refused(talk, token):
    with pytest.raises(InvalidRequest, match=rf"token id {token}, but ids lie in \[0, 49152\)") as refusal:
        talk.add("a", [1, token, 2])
    assert refusal.value.param == "prompt"
    assert not talk.engine.has_work


def test_an_empty_prompt_is_refused(talk):
    with pytest.raises(InvalidRequest, match="prompt has no tokens"):
        talk.add("a", [])


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"logit_bias": {49152: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (49152,)}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_parameters_are_checked_against_the_model(talk, settings, param):
    with pytest.raises(InvalidRequest) as refusal:
        talk.add("a", PROMPT, **settings)
    assert refusal.value.param == param
    assert not talk.engine.has_work


def test_an_idle_engine_steps_to_nothing(talk):
    before = talk.engine.stats()
    assert not talk.engine.has_work
    assert talk.step() == []
    assert talk.engine.stats() == before
