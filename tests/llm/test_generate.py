from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import ContextLengthExceeded, InvalidRequest
from tokenmill.text.chat import encode_chat
from tokenmill.text.templates import BUILT_IN

FRANCE = "The capital of France is"
PROMPTS = [FRANCE, "2+2=", "Once upon a time", "def fibonacci(n):", "The quick brown fox jumps over the lazy dog, and then"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
HELLO = [{"role": "user", "content": "Hello! Who are you?"}]


def text_of(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> str:
    [result] = llm.generate(prompt, params)
    return result.outputs[0].text


def test_a_prompt_may_be_text_token_ids_or_a_dict_of_either(llm: LLM) -> None:
    ids = llm.tokenizer.encode(FRANCE)
    forms: list[Any] = [ids, tuple(ids), np.array(ids), [np.int32(t) for t in ids], {"prompt": FRANCE}, {"prompt_token_ids": ids}]
    expected = text_of(llm, FRANCE)
    assert expected.startswith(" Paris")
    assert text_of(llm, forms[0]) == text_of(llm, forms[2]) == text_of(llm, forms[4]) == expected
    assert [r.outputs[0].text for r in llm.generate([FRANCE, *forms], GREEDY)] == [expected] * (len(forms) + 1)


def test_a_result_says_what_was_asked_and_what_came(llm: LLM) -> None:
    [result] = llm.generate(FRANCE, GREEDY)
    [choice] = result.outputs
    assert result.prompt == FRANCE
    assert result.prompt_token_ids == llm.tokenizer.encode(FRANCE)
    assert llm.tokenizer.decode(choice.token_ids) == choice.text
    assert (choice.index, choice.finish_reason, choice.stop_reason, choice.logprobs) == (0, "length", None, None)
    assert choice.cumulative_logprob is None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(result.prompt_token_ids), 12)
    metrics = result.metrics
    assert metrics.queue_time is not None
    assert metrics.ttft is not None
    assert metrics.e2e is not None
    assert 0 <= metrics.queue_time <= metrics.ttft <= metrics.e2e
    assert llm.generate({"prompt_token_ids": result.prompt_token_ids}, GREEDY)[0].prompt is None


def test_answers_are_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    params = [SamplingParams(temperature=t, seed=s, max_tokens=6, logprobs=1) for s, t in enumerate([0, 0.5, 1.0, 1.5, 0.8])]
    batch = llm.generate(PROMPTS, params)
    for prompt, own, together in zip(PROMPTS, params, batch, strict=True):
        [alone] = llm.generate(prompt, own)
        assert together.prompt == prompt
        assert together.outputs == alone.outputs


def test_threads_share_one_model(llm: LLM) -> None:
    prompts = [f"The number after {n} is" for n in range(6)]
    alone = [text_of(llm, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: text_of(llm, prompt), prompts)) == alone


def test_a_repeated_prompt_is_found_in_the_cache_and_answered_the_same(llm: LLM) -> None:
    prompt = "In the beginning there was a long sentence, and it was so long that it filled several frames of the cache."
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert second.usage.cached_tokens >= 8
    assert second.outputs == first.outputs


def test_choices_of_one_request_differ_and_are_reproducible(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8)
    [result] = llm.generate("A word:", params)
    assert [c.index for c in result.outputs] == [0, 1, 2]
    assert len({c.text for c in result.outputs}) == 3
    assert result.usage.completion_tokens == sum(len(c.token_ids) for c in result.outputs)
    assert llm.generate("A word:", params)[0].outputs == result.outputs


def test_a_seed_repeats_an_answer_and_without_one_it_is_drawn_anew(llm: LLM) -> None:
    def answer(seed: int | None) -> str:
        return text_of(llm, "Name a thing:", SamplingParams(seed=seed, max_tokens=6))

    assert answer(7) == answer(7)
    assert answer(7) != answer(8)
    assert len({answer(None) for _ in range(3)}) > 1


def cuts(text: str) -> list[str]:
    """Strings in the middle of a text that begin and end inside tokens."""
    return [text[i : i + width] for i, width in [(9, 3), (14, 7), (20, 2)]]


@pytest.mark.parametrize("cut", range(3))
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_exactly_there(llm: LLM, cut: int, include: bool) -> None:
    whole = text_of(llm, FRANCE, SamplingParams(temperature=0, max_tokens=30))
    stop = cuts(whole)[cut]
    params = SamplingParams(temperature=0, max_tokens=30, stop=(stop, "never there"), include_stop_str_in_output=include)
    [result] = llm.generate(FRANCE, params)
    end = whole.index(stop) + (len(stop) if include else 0)
    assert (result.outputs[0].text, result.outputs[0].finish_reason) == (whole[:end], "stop")
    pieces = [text for text, _ in llm.stream_generate(FRANCE, params)]
    assert "".join(pieces) == whole[:end]
    assert all(whole[:end].startswith("".join(pieces[:k])) for k in range(len(pieces)))


def test_a_lone_stop_string_and_a_list_of_them_are_understood(llm: LLM) -> None:
    whole = text_of(llm, FRANCE, SamplingParams(temperature=0, max_tokens=30))
    stop: Any = cuts(whole)[1]
    assert text_of(llm, FRANCE, SamplingParams(temperature=0, max_tokens=30, stop=stop)) == whole[: whole.index(stop)]
    assert text_of(llm, FRANCE, SamplingParams(temperature=0, max_tokens=30, stop=[stop])) == whole[: whole.index(stop)]  # type: ignore[arg-type]


def test_stopping_one_choice_leaves_its_siblings(llm: LLM) -> None:
    free = llm.generate("A word:", SamplingParams(n=2, seed=5, max_tokens=12))[0].outputs
    stop = free[0].text[4:7]
    assert stop not in free[1].text, "the texts of this seed must differ"
    held = llm.generate("A word:", SamplingParams(n=2, seed=5, max_tokens=12, stop=(stop,)))[0].outputs
    assert (held[0].text, held[0].finish_reason) == (free[0].text[: free[0].text.index(stop)], "stop")
    assert (held[1].text, held[1].finish_reason) == (free[1].text, "length")


def test_a_stop_token_is_named(llm: LLM) -> None:
    [result] = llm.generate(FRANCE, GREEDY)
    token = result.outputs[0].token_ids[3]
    [stopped] = llm.generate(FRANCE, SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(token,)))
    assert stopped.outputs[0].stop_reason == token
    assert stopped.outputs[0].token_ids == result.outputs[0].token_ids[: result.outputs[0].token_ids.index(token) + 1]


def test_log_probabilities_run_beside_the_tokens(llm: LLM) -> None:
    [result] = llm.generate(FRANCE, SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    [choice] = result.outputs
    assert choice.logprobs is not None
    assert [entry.token for entry in choice.logprobs] == choice.token_ids
    for entry in choice.logprobs:
        assert entry.rank == 0
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token, entry.logprob)
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
    assert choice.cumulative_logprob == sum(entry.logprob for entry in choice.logprobs)


def test_a_token_is_exactly_as_likely_in_a_prompt_as_in_an_answer(llm: LLM) -> None:
    [said] = llm.generate(FRANCE, SamplingParams(temperature=0, max_tokens=6, logprobs=2))
    ids = said.prompt_token_ids + said.outputs[0].token_ids
    [read] = llm.generate(ids, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))
    assert read.prompt_logprobs is not None
    assert read.prompt_logprobs[0] is None
    assert len(read.prompt_logprobs) == len(ids)
    assert read.prompt_logprobs[-6:] == said.outputs[0].logprobs


def test_chat_is_the_template_and_a_completion(llm: LLM) -> None:
    ids = llm.apply_chat_template(HELLO)
    assert llm.tokenizer.decode(ids, skip_special=False).endswith("<|im_start|>assistant\n")
    [result] = llm.chat(HELLO, GREEDY)
    assert result.prompt_token_ids == ids
    assert result.outputs == llm.generate(ids, GREEDY)[0].outputs


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    other = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
    both = llm.chat([HELLO, other], GREEDY)
    assert [r.outputs for r in both] == [llm.chat(m, GREEDY)[0].outputs for m in (HELLO, other)]


def test_a_stream_is_the_same_answer_in_pieces(llm: LLM) -> None:
    pieces, finished = [], []
    for text, result in llm.stream_chat(HELLO, GREEDY):
        pieces.append(text)
        finished.append(result.finished)
    assert "".join(pieces) == llm.chat(HELLO, GREEDY)[0].outputs[0].text
    assert len(pieces) > 5
    assert finished == [False] * (len(pieces) - 1) + [True]


def test_streams_may_be_read_side_by_side_and_around_a_batch(llm: LLM) -> None:
    first, second = llm.stream_generate(FRANCE, GREEDY), llm.stream_generate("2+2=", GREEDY)
    texts = ["", ""]
    for a, b in itertools.islice(zip(first, second, strict=False), 3):
        texts = [texts[0] + a[0], texts[1] + b[0]]
    between = text_of(llm, PROMPTS[2])
    texts = [texts[0] + "".join(t for t, _ in first), texts[1] + "".join(t for t, _ in second)]
    assert [*texts, between] == [text_of(llm, p) for p in PROMPTS[:2] + PROMPTS[2:3]]


def test_statistics_of_the_cache_add_up_while_a_request_runs(llm: LLM) -> None:
    with closing(llm.stream_generate(list(range(100, 200)), SamplingParams(max_tokens=400))) as stream:
        next(stream)
        cache = llm.get_kv_cache_stats()
    assert cache["total_frames"] == cache["free_frames"] + cache["used_frames"] + cache["cached_frames"]
    assert cache["used_frames"] >= 13
    by_size = cache["pages_by_size"]
    assert sum(size // 8 * pages["free"] for size, pages in by_size.items()) == cache["free_frames"]
    assert by_size[64]["used"] >= 1, "of a prompt of 100 tokens the first 64 are one page"
    assert 0 < cache["fragmentation"] < 0.1
    assert cache["bytes_by_format"]["bf16"]["used"] == cache["used_frames"] * 8 * cache["bytes_per_token"]
    assert cache["saved_memory_gb"] == 0
    assert cache["budget_events"] == {"sparsified": 0, "dropped_frames": 0, "ended": 0, "refused": 0}


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    with closing(llm.stream_generate(FRANCE, SamplingParams(max_tokens=400))) as stream:
        next(stream)
        assert llm.get_kv_cache_stats()["used_frames"] > 0
    assert llm.get_kv_cache_stats()["used_frames"] == 0


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


BAD: list[tuple[Any, Any, str]] = [
    (5, None, "a prompt is a string, a list of token ids.*not int"),
    (b"abc", None, "not bytes"),
    ([FRANCE, 5], None, "not int"),
    ([True, False], None, "not bool"),
    ([1.5], None, "not float"),
    ({"prompt_ids": [1]}, None, r"not \{'prompt_ids'\}"),
    ({"prompt": [1]}, None, r"not \{'prompt'\}"),
    ({"prompt_token_ids": "a"}, None, r"not \{'prompt_token_ids'\}"),
    ({"prompt": "a", "prompt_token_ids": [1]}, None, "not {"),
    ("", None, "prompt has no tokens"),
    ([[]], None, "prompt has no tokens"),
    ([10**6], None, "token id 1000000, but ids lie in"),
    ([-1], None, "token id -1"),
    ("\ud800", None, "not valid Unicode"),
    (FRANCE, {"temperature": 1}, "must be SamplingParams, not dict"),
    (FRANCE, [GREEDY, GREEDY], "there are 1 prompts, but 2 sampling parameters"),
    (FRANCE, SamplingParams(temperature="hot"), r"Expected `float`, got `str` - at `\$.temperature`"),  # type: ignore[arg-type]
    (FRANCE, SamplingParams(temperature=-1), "temperature is -1"),
    (FRANCE, SamplingParams(max_tokens=0), "max_tokens is 0"),
    (FRANCE, SamplingParams(stop=("",)), "stop is"),
    (FRANCE, SamplingParams(min_tokens=600), "min_tokens is 600"),
    (FRANCE, SamplingParams(stop_token_ids=(10**6,)), "stop_token_ids"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), BAD)
def test_what_cannot_be_served_is_refused_and_nothing_is_generated(llm: LLM, prompt: Any, params: Any, message: str) -> None:
    made = llm._running.stats().generation_tokens
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt, params)
    assert llm._running.stats().generation_tokens == made


def test_one_bad_prompt_refuses_the_batch(llm: LLM) -> None:
    made = llm._running.stats().generation_tokens
    with pytest.raises(InvalidRequest, match="token id 999999"):
        llm.generate([FRANCE, [999999]], GREEDY)
    assert llm._running.stats().generation_tokens == made
    assert text_of(llm, FRANCE).startswith(" Paris")


@pytest.mark.parametrize("messages", [[], "Hello", 5, {}, [{"role": "robot", "content": "x"}], [{"role": "user"}], [5], [[]]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat(messages)


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"prompt has 600 tokens, model context is 512"):
        llm.generate([[1] * 600])
    with pytest.raises(ContextLengthExceeded, match=r"prompt has 500 tokens, model context is 512 \(max_tokens 20\)"):
        llm.generate([[1] * 500], SamplingParams(max_tokens=20))


def test_a_stream_has_one_choice_and_says_so_at_once(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="n is 2, but a stream has one choice"):
        llm.stream_generate(FRANCE, SamplingParams(n=2))


def test_without_max_tokens_the_answer_may_fill_the_context(llm: LLM) -> None:
    [result] = llm.generate([[5] * 505], SamplingParams(temperature=0, ignore_eos=True))
    assert (result.outputs[0].finish_reason, result.usage.completion_tokens) == ("length", 7)


def test_chatml_for_smollm2_is_its_own_template(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    chosen = BUILT_IN["chatml"].bind(llm.tokenizer)
    assert encode_chat(llm.tokenizer, chosen, messages) == llm.apply_chat_template(messages)
