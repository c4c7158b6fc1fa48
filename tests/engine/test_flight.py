"""The step in flight: what is told when, and what may happen in the meantime."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.core.types import FinishReason

LONG = np.random.default_rng(5).integers(0, 499, 300).tolist()
PROMPT = LONG[:20]
ABORT, LENGTH = FinishReason.ABORT, FinishReason.LENGTH


class Watch:
    """Stands between an engine and its runner: notes in `log` when steps start and finish, and fails when told to."""

    def __init__(self, engine):
        self.runner, engine._runner = engine._runner, self
        self.log = []
        self.starts = self.finishes = 0
        self.fail_in = None

    def start(self, step):
        self._fail("start")
        self.starts += 1
        self.log.append(f"start {self.starts}")
        return self.runner.start(step)

    def finish(self, flight, generations, proposals=None):
        result = self.runner.finish(flight, generations, proposals)
        self._fail("finish")
        self.finishes += 1
        self.log.append(f"finish {self.finishes}")
        return result

    def execute(self, flight):
        logits = self.runner.execute(flight)
        self._fail("execute")
        return logits

    def give_way(self):
        self.runner.give_way()

    def _fail(self, where):
        if self.fail_in == where:
            self.fail_in = None
            raise MemoryError(f"no memory to {where} with")


@pytest.fixture
def talk(build):
    return build(chunk_size=64)


@pytest.fixture
def watch(talk):
    return Watch(talk.engine)


def test_the_tokens_of_a_step_are_told_when_the_next_one_has_started(talk, watch):
    talk.add("a", PROMPT, max_tokens=3)
    while talk.engine.has_work:
        watch.log.append([token for output in talk.step() for token in output.tokens])
    tokens = talk.finish()["a", 0].tokens
    assert watch.log == ["start 1", [], "finish 1", "start 2", tokens[:1], "finish 2", "start 3", tokens[1:2], "finish 3", tokens[2:]]


def test_a_caller_may_finish_the_step_first_and_change_what_comes_next(talk, watch):
    talk.add("a", PROMPT, max_tokens=5)
    talk.step()
    assert [output.request_id for output in talk.finish_step()] == ["a"]
    assert talk.finish_step() == []
    talk.add("b", LONG[50:70], max_tokens=1)
    talk.engine.give_way()
    talk.engine.start_step()
    assert [output.request_id for output in talk.step()] == ["a", "b"]
    assert watch.log[:4] == ["start 1", "finish 1", "start 2", "finish 2"]
    talk.finish()


def test_what_is_added_in_flight_takes_part_in_the_next_step(talk):
    alone = [talk.ask(prompt).tokens for prompt in (PROMPT, LONG[50:70])]
    talk.add("a", PROMPT)
    talk.step()
    talk.add("b", LONG[50:70])
    assert talk.engine.stats().waiting == 1
    assert [output.request_id for output in talk.step()] == ["a"]
    assert [output.request_id for output in talk.step()] == ["a", "b"]
    answers = talk.finish()
    assert [answers["a", 0].tokens, answers["b", 0].tokens] == alone


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_what_is_aborted_in_flight_leaves_nothing_that_was_not_computed(talk, steps):
    """Steps 1 to 3 compute the 150 tokens of the prompt, 64 in each; frames are of 8 tokens."""
    prompt = LONG[:150]
    talk.add("a", prompt)
    for _ in range(steps):
        talk.step()
    talk.engine.abort("a")
    stats = talk.engine.stats()
    assert stats.kv_held == 0
    assert stats.kv_cached == min(64 * (steps - 1), 150 + max(0, steps - 4)) // 8, "the step in flight has not computed its frames"
    talk.engine.check_integrity()
    told = talk.finish()["a", 0]
    assert (len(told.tokens), told.finish_reason) == (max(0, steps - 3), ABORT)
    assert talk.engine.stats().kv_cached == stats.kv_cached
    talk.add("a", prompt, prompt_logprobs=0)
    uncached = talk.finish()["a", 0]
    again = talk.ask(prompt)
    assert again.cached_tokens == 144
    assert again.tokens == uncached.tokens


def test_an_id_that_is_aborted_in_flight_can_be_used_at_once(talk):
    alone = talk.ask(LONG[50:70], temperature=1.0).tokens
    talk.add("a", PROMPT, temperature=1.0)
    talk.step()
    talk.step()
    talk.engine.abort("a")
    talk.add("a", LONG[50:70], temperature=1.0)
    outputs = []
    while talk.engine.has_work:
        outputs += talk.engine.step()
    first, *rest = outputs
    assert (first.tokens, first.finish_reason) == ([], ABORT)
    assert [token for output in rest for token in output.tokens] == alone


def test_one_of_many_that_is_aborted_in_flight_changes_nothing_for_the_others(talk):
    """More prompt rows are wanted than there is room for logits, and the rows of the aborted one lie between the others'."""
    alone = talk.ask(LONG[:30], prompt_logprobs=2, logprobs=1)
    for name in "abc":
        talk.add(name, LONG[:30], prompt_logprobs=2, logprobs=1)
    talk.step()
    talk.engine.abort("b")
    answers = talk.finish()
    assert answers["b", 0].tokens == []
    for name in "ac":
        assert answers[name, 0] == alone


def test_an_abort_after_a_step_has_finished_comes_after_its_token(talk):
    talk.add("a", PROMPT)
    talk.step()
    outputs = talk.finish_step()
    talk.engine.abort("a")
    outputs += talk.step()
    assert [(len(output.tokens), output.finish_reason) for output in outputs] == [(1, None), (0, ABORT)]
    assert not talk.engine.has_work


def test_an_abort_of_what_has_ended_in_the_finished_step_is_late(talk):
    talk.add("a", PROMPT, max_tokens=1)
    talk.step()
    outputs = talk.finish_step()
    talk.engine.abort("a")
    outputs += talk.step()
    assert [(len(output.tokens), output.finish_reason) for output in outputs] == [(1, LENGTH)]
    assert not talk.engine.has_work


def test_when_all_are_aborted_in_flight_the_next_step_is_the_last(talk, watch):
    talk.add("a", PROMPT)
    talk.step()
    talk.engine.abort("a")
    assert talk.engine.has_work
    assert len(talk.step()) == 1
    assert not talk.engine.has_work
    assert watch.log == ["start 1", "finish 1"]


def test_closing_finishes_the_step_in_flight(talk, watch):
    for name in "ab":
        talk.add(name, PROMPT, n=2)
    talk.step()
    talk.engine.close()
    assert watch.log == ["start 1", "finish 1"]
    assert not talk.engine.has_work
    assert talk.step() == []
    stats = talk.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_held, stats.kv_cached) == (0, 0, 0, 0)
    talk.engine.check_integrity()


def test_what_is_added_and_aborted_between_execution_and_finish_counts_as_in_flight(talk, watch):
    alone = talk.ask(PROMPT).tokens
    talk.add("a", PROMPT)
    talk.add("b", LONG[50:70])
    talk.step()
    talk.engine.execute()
    talk.engine.execute()
    assert watch.finishes == watch.starts - 1
    talk.engine.abort("b")
    talk.add("c", LONG[:20])
    assert [(output.request_id, len(output.tokens)) for output in talk.finish_step()] == [("b", 0), ("a", 1)]
    answers = talk.finish()
    assert answers["a", 0].tokens == answers["c", 0].tokens == alone


def test_nothing_is_executed_when_nothing_is_in_flight(talk):
    talk.engine.execute()
    assert talk.finish_step() == []


@pytest.mark.parametrize("where", ["start", "execute", "finish"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_a_step_that_fails_is_planned_again(talk, watch, where, steps):
    """Nothing is lost and nothing told twice, whether it fails in the prompt (three steps) or after it."""
    prompt = LONG[:150]
    alone = talk.ask(prompt, temperature=1.0, max_tokens=4, logprobs=1)
    talk.add("a", [9, *prompt], max_tokens=1)  # the cache does not shorten the prompt
    talk.finish()
    talk.add("a", prompt, temperature=1.0, max_tokens=4, logprobs=1, prompt_logprobs=0)
    for _ in range(steps):
        talk.step()
    if where != "start" and steps == 0:
        talk.step()
    watch.fail_in = where
    with pytest.raises(MemoryError, match=f"no memory to {where} with"):
        (talk.engine.execute if where == "execute" else talk.step)()
    talk.engine.check_integrity()
    answer = talk.finish()["a", 0]
    assert (answer.tokens, answer.logprobs, answer.finish_reason) == (alone.tokens, alone.logprobs, LENGTH)
    assert watch.starts - watch.finishes == (where != "start")


def test_after_a_failed_step_a_request_can_be_aborted(talk, watch):
    talk.add("a", PROMPT)
    talk.step()
    watch.fail_in = "finish"
    with pytest.raises(MemoryError):
        talk.step()
    talk.engine.abort("a")
    assert talk.engine.stats().kv_held == 0
    assert talk.finish()["a", 0].finish_reason == ABORT
