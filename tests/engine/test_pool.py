"""Engines with little memory: refusals, preemption, counters that add up."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_gguf import ARCHITECTURES, TinyModel

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.errors import ConfigError, ContextLengthExceeded, ModelNotFound
from tokenmill.core.types import FinishReason

LONG = np.random.default_rng(3).integers(0, 499, 300).tolist()


def balance(talk):
    """Whether the frames add up; returns the counters."""
    stats = talk.engine.stats()
    assert stats.kv_free + stats.kv_cached + stats.kv_held == stats.kv_total
    return stats


def test_a_stated_length_that_the_pool_cannot_hold_is_an_error_with_the_numbers(build, smollm2_path):
    with pytest.raises(ConfigError, match=r"holds 80 tokens, but max_model_len is 512: raise memory_budget_gb to 0\.011") as refusal:
        build(frames=10, frame_bytes=8 * 30 * 3 * 64 * 2 * 2, model=smollm2_path, max_model_len=512)
    assert refusal.value.param == "memory_budget_gb"


def test_a_pool_without_room_for_a_frame_is_an_error(build):
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        build(frames=0)


def test_a_stated_length_beyond_the_models_context_is_an_error(build):
    with pytest.raises(ConfigError, match="max_model_len is 100000, but the model's context is 8192"):
        build(max_model_len=100_000)


def test_a_model_that_is_not_there_is_an_error(build, tmp_path):
    with pytest.raises(ModelNotFound, match=r"no\.gguf"):
        build(model=tmp_path / "no.gguf")


def test_a_small_pool_limits_the_context_to_what_it_holds(build):
    talk = build(frames=12)
    assert (talk.engine.info.max_model_len, talk.engine.info.kv_tokens) == (96, 96)
    with pytest.raises(ContextLengthExceeded, match="96"):
        talk.add("a", LONG[:90], max_tokens=7)


def test_the_whole_pool_serves_one_request_to_its_last_token(build):
    talk = build(frames=12)
    answer = talk.ask(LONG[:60], max_tokens=36)
    assert (len(answer.tokens), answer.finish_reason) == (36, FinishReason.LENGTH)
    assert balance(talk).preemptions == 0


def test_preemption_is_counted_and_changes_no_answer(build):
    roomy, tight = build(), build(frames=20)
    answers = []
    for talk in (roomy, tight):
        for i in range(5):
            talk.add(str(i), LONG[i : i + 40], max_tokens=50, temperature=0.9, seed=i, logprobs=2, repetition_penalty=1.2, ignore_eos=True)
        answers.append(talk.finish())
    assert balance(roomy).preemptions == 0
    assert balance(tight).preemptions > 0
    for key, answer in answers[0].items():
        other = answers[1][key]
        assert (other.tokens, other.logprobs, other.finish_reason) == (answer.tokens, answer.logprobs, answer.finish_reason)


def test_an_aborted_sequence_may_be_a_preempted_one(build):
    talk = build(frames=20)
    for i in range(5):
        talk.add(str(i), LONG[i : i + 40], max_tokens=50)
    while talk.engine.stats().preemptions == 0:
        talk.step()
    for i in reversed(range(5)):
        talk.engine.abort(str(i))
        balance(talk)
        talk.engine.check_integrity()
    ends = {answer.finish_reason for answer in talk.finish().values()}
    assert ends == {FinishReason.ABORT}
    assert balance(talk).kv_held == 0


def test_counters_add_up(build):
    talk = build()
    start = talk.engine.stats()
    assert (start.prompt_tokens, start.generation_tokens, start.steps, start.kv_free) == (0, 0, 0, start.kv_total)
    talk.add("a", LONG[:33], max_tokens=5)
    assert balance(talk).waiting == 1
    talk.step()
    started = balance(talk)
    assert (started.waiting, started.running, started.steps) == (0, 1, 0)
    talk.step()
    during = balance(talk)
    assert (during.waiting, during.running, during.steps) == (0, 1, 1)
    assert during.kv_held >= 5
    talk.finish()
    talk.add("b", LONG[:33], max_tokens=3, n=2)
    talk.finish()
    end = balance(talk)
    assert (end.waiting, end.running, end.kv_held) == (0, 0, 0)
    assert end.prompt_tokens == 33 + 33
    assert end.generation_tokens == 5 + 2 * 3
    assert end.steps == 5 + 3
    assert (end.prefix_queries, end.prefix_hits) == (3 * 33, 2 * 32)
    assert end.kv_cached > 0


def test_statistics_tell_what_is_shared_by_page_and_what_that_saves(build):
    talk = build()
    talk.add("a", LONG[:70], max_tokens=9, n=3)
    for _ in range(3):
        talk.step()
    stats = balance(talk)
    # Frames for 70 tokens and the next ones: a page of 64 tokens that all three hold, and one of 8 for each.
    assert (stats.running, stats.kv_shared, stats.kv_held, stats.kv_saved) == (3, 8, 8 + 3, 2 * 8)
    assert {size: (pages.used, pages.cached, pages.shared) for size, pages in stats.kv_pages.items()} == {
        8: (3, 0, 0), 16: (0, 0, 0), 32: (0, 0, 0), 64: (1, 0, 1),
    }  # fmt: skip
    assert stats.kv_frame_bytes == talk.engine.info.kv_bytes_per_token * 8
    assert stats.kv_unfilled == 3 * 72 - (71 + 70 + 70), "the followers are a token behind"
    talk.finish()
    stats = balance(talk)
    assert (stats.kv_shared, stats.kv_saved, stats.kv_unfilled) == (0, 0, 0)
    assert sum(pages.cached for pages in stats.kv_pages.values()) > 0
    assert not any(pages.used or pages.shared for pages in stats.kv_pages.values())


def test_without_sharing_nothing_is_cached(build):
    talk = build(block_manager_config=BlockManagerConfig(enable_prefix_sharing=False))
    assert [talk.ask(LONG[:64]).cached_tokens for _ in range(2)] == [0, 0]
    stats = balance(talk)
    assert (stats.prefix_hits, stats.kv_cached, stats.kv_free) == (0, 0, stats.kv_total)


def test_cached_frames_make_room_for_others(build):
    talk = build(frames=16)
    for i in range(6):
        talk.ask(LONG[20 * i : 20 * i + 60], max_tokens=2)
    assert balance(talk).evictions > 0


def test_closing_forgets_everything(build):
    talk = build()
    talk.add("a", LONG[:30], n=3)
    talk.step()
    talk.add("b", LONG[:30])
    talk.engine.close()
    stats = balance(talk)
    assert (stats.running, stats.waiting, stats.kv_held) == (0, 0, 0)
    assert not talk.engine.has_work


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("vocab", "tied", "kind"), [(33, True, "F32"), (97, False, "Q8_0"), (130, True, "Q5_1")])
def test_every_architecture_generates_and_judges_alike(build, tmp_path, architecture, vocab, tied, kind):
    """What decoding said of its tokens is what a prefill says of them, bit for bit; past the window, in chunks, under preemption."""
    model = TinyModel(architecture, vocab=vocab, tied=tied, kind=kind)
    frames = 12 if architecture == "gemma3" else 24  # its window keeps few
    talk = build(model=model.write(tmp_path / "tiny.gguf"), frames=frames, chunk_size=16)
    assert talk.engine.info.vocab_size == vocab
    prompts = [[t % vocab for t in LONG[30 * i : 30 * i + 30]] for i in range(4)]
    for i, prompt in enumerate(prompts):
        talk.add(str(i), prompt, max_tokens=60, temperature=3.0, seed=i, logprobs=3)
    answers = talk.finish()
    # Nothing preempts sequences that see no more than a window, since none of them grows.
    assert balance(talk).preemptions > 0 or architecture == "gemma3"
    for i, prompt in enumerate(prompts):
        answer = answers[str(i), 0]
        assert len(set(answer.tokens)) > 5
        forced = talk.ask(prompt + answer.tokens, max_tokens=1, prompt_logprobs=3)
        assert forced.prompt_logprobs[30:] == answer.logprobs


def test_a_vocabulary_smaller_than_the_alternatives_asked_for(build, tmp_path):
    talk = build(model=TinyModel(vocab=17).write(tmp_path / "tiny.gguf"))
    answer = talk.ask([1, 2, 3], logprobs=20, prompt_logprobs=20, max_tokens=2)
    assert [len(found.top) for found in (*answer.logprobs, *answer.prompt_logprobs[1:])] == [17] * 4
