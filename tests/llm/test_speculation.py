"""An answer with speculation is the answer without in every field but `usage.speculation`, though a step brings several tokens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guesser import Guesser, engines_guess_by

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.core.types import SpeculationUsage
from tokenmill.llm import RequestOutput

COUNT = "Count: one, two, three, four, five, six, seven, eight, nine, ten. Count again: one, two,"
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
SETTINGS: dict[str, Any] = {"max_model_len": 512, "kv_cache_config": {"memory_budget_gb": 0.25}}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "seed": 3},
    "filters": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 5},
    "logprobs": {"temperature": 0.8, "seed": 7, "logprobs": 3, "prompt_logprobs": 2},
    "penalties": {
        "temperature": 0.7, "seed": 1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.4,
        "logit_bias": {28: -3.0, 284: 2.0},
    },
    "choices": {"temperature": 1, "seed": 9, "n": 3, "logprobs": 0},
    "stop string": {"temperature": 0, "stop": ("seven, ei",), "logprobs": 1},
    "stop string kept": {"temperature": 0, "stop": ("ix, se", "nothing"), "include_stop_str_in_output": True, "logprobs": 1},
    "stop string of one token": {"temperature": 0, "stop": (" six",)},
    "stop string for choices": {"temperature": 1, "seed": 9, "n": 3, "stop": (",",), "min_tokens": 5},
    "min_tokens": {"temperature": 0, "stop": ("four",), "stop_token_ids": (198,), "min_tokens": 12},
    "stop token": {"temperature": 0, "stop_token_ids": (4962,), "include_stop_str_in_output": True, "logprobs": 0},
    "one token": {"temperature": 0, "max_tokens": 1},
    "two tokens": {"temperature": 0, "max_tokens": 2, "logprobs": 2},
    "special tokens": {"temperature": 0.9, "seed": 2, "ignore_eos": True, "skip_special_tokens": False},
}  # fmt: skip


def params_of(case: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 40} | case))


def same(plain: RequestOutput, drafted: RequestOutput) -> None:
    """Raises unless the two are equal but for the id, the times and `usage.speculation`."""
    assert plain.usage.speculation is None
    assert drafted.usage.speculation is not None
    for result in (plain, drafted):
        assert result.finished
    unlike = {"request_id": "", "metrics": None}
    bare = dataclasses.replace(drafted, usage=dataclasses.replace(drafted.usage, speculation=None), **unlike)  # type: ignore[arg-type]
    assert bare == dataclasses.replace(plain, **unlike)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def guesser() -> Guesser:
    return Guesser()


@pytest.fixture(scope="module")
def drafting(smollm2_path: Path, guesser: Guesser) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_CHECK", "1")
        engines_guess_by(guesser, patch)
        llm = LLM(smollm2_path, **SETTINGS)
    with llm:
        yield llm
        assert llm.get_kv_cache_stats()["used_frames"] == 0


def teach(guesser: Guesser, result: RequestOutput) -> None:
    guesser.texts = [result.prompt_token_ids + choice.token_ids for choice in result.outputs]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_answer_is_the_same_in_every_field(plain: LLM, drafting: LLM, guesser: Guesser, case: dict[str, Any]) -> None:
    # What guessing is taught goes on behind a stop string, so that steps bring more than the answer is to have.
    longer = {name: value for name, value in case.items() if not name.startswith("stop") and name != "max_tokens"}
    teach(guesser, plain.generate(COUNT, params_of(longer))[0])
    drafting.generate(COUNT, SamplingParams(max_tokens=1))  # both have the prompt now
    params = params_of(case)
    wanted = plain.generate(COUNT, params)[0]
    result = drafting.generate(COUNT, params)[0]
    same(wanted, result)
    counted = result.usage.speculation
    assert counted is not None
    assert (counted.accepted > 0) == (params.max_tokens == 40), "one or two tokens leave no room for a draft"


def test_what_was_drafted_is_counted(plain: LLM, drafting: LLM, guesser: Guesser) -> None:
    """Of one sequence of 41 tokens behind a prompt whose length decides where guesses are wrong."""
    params = params_of({"temperature": 0, "max_tokens": 41})
    teach(guesser, plain.generate(COUNT, params)[0])
    result = drafting.generate(COUNT, params)[0]
    usage = result.usage.speculation
    assert usage is not None
    assert (usage.proposer, drafting.info.proposer, plain.info.proposer) == ("guesser", "guesser", None)
    assert 1 + usage.drafts + usage.accepted == 41, "the prompt's own token, one of each step, and those that were guessed"
    assert usage.drafted == sum(usage.drafted_by_position)
    assert usage.accepted == sum(usage.accepted_by_position)
    assert usage.mean_accepted_length == 1 + usage.accepted / usage.drafts
    assert usage.drafted_by_position[0] == usage.drafts
    assert all(later <= earlier for earlier, later in zip(usage.drafted_by_position, usage.drafted_by_position[1:], strict=False))
    assert all(right <= tried for tried, right in zip(usage.drafted_by_position, usage.accepted_by_position, strict=True))


def test_nothing_behind_a_stop_string_counts_as_accepted(plain: LLM, drafting: LLM, guesser: Guesser) -> None:
    teach(guesser, plain.generate(COUNT, params_of({"temperature": 0}))[0])
    usage = drafting.generate(COUNT, params_of({"temperature": 0, "stop": ("four",)}))[0].usage
    assert usage.speculation is not None
    assert usage.speculation.accepted < usage.completion_tokens


def test_a_stop_string_hides_the_end_token_that_came_with_it(plain: LLM, drafting: LLM, guesser: Guesser) -> None:
    whole = plain.chat(FRANCE, params_of({"temperature": 0}))[0]
    choice = whole.outputs[0]
    assert choice.stop_reason == choice.token_ids[-1], "it ends by itself"
    drafting.chat(FRANCE, SamplingParams(max_tokens=1))
    teach(guesser, whole)
    for stop in (".", "s.", "Paris", " is", "capital of"):
        for kept in (False, True):
            case = params_of({"temperature": 0, "stop": (stop,), "include_stop_str_in_output": kept})
            result = drafting.chat(FRANCE, case)[0]
            same(plain.chat(FRANCE, case)[0], result)
            assert result.outputs[0].stop_reason is None


def test_an_end_token_whose_text_ends_a_stop_string_is_the_reason(plain: LLM, drafting: LLM, guesser: Guesser) -> None:
    whole = plain.chat(FRANCE, params_of({"temperature": 0}))[0]
    teach(guesser, whole)
    more = {
        "temperature": 0,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop": (whole.outputs[0].text[-1] + "<|im_end|>",),
    }
    drafting.chat(FRANCE, SamplingParams(max_tokens=1))
    wanted = plain.chat(FRANCE, params_of(more))[0]
    assert wanted.outputs[0].text.endswith("<|im_end|>")
    assert wanted.outputs[0].stop_reason == whole.outputs[0].token_ids[-1]
    same(wanted, drafting.chat(FRANCE, params_of(more))[0])


def test_what_is_given_up_behind_a_stop_string_is_not_told(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may come to a point of the budget with tokens that the answer is not to have."""
    guesser, prompt = Guesser(), COUNT * 18
    settings = SETTINGS | {"max_model_len": 1024, "attention_config": {"sparse_attention": {"enabled": True, "strategy": "topk_heads"}}}
    with LLM(smollm2_path, **settings) as plain:
        engines_guess_by(guesser, monkeypatch)
        with LLM(smollm2_path, **settings) as drafting:
            base = {"temperature": 0, "ignore_eos": True, "kv_budget_mb": 600 * plain.info.kv_bytes_per_token / 2**20}
            whole = plain.generate(prompt, params_of(base))[0]
            teach(guesser, whole)
            drafting.generate(prompt, params_of(base | {"max_tokens": 1}))
            tokens, told = whole.outputs[0].token_ids, set()
            for end in range(8, 32):
                stop = plain.tokenizer.decode(tokens[:end])
                params = params_of(base | {"stop": (stop,), "include_stop_str_in_output": True})
                wanted, result = (llm.generate(prompt, params)[0] for llm in (plain, drafting))
                told.add(wanted.usage.kv.dropped_tokens)
                same(wanted, result)
            assert len(told) > 3, "some answers end before the first point, some behind it, where more goes with every frame"


def test_prompts_together_answer_as_without(plain: LLM, drafting: LLM, guesser: Guesser) -> None:
    prompts = [COUNT, "The capital of France is", "def add(a, b):\n    return", "Once upon a time, in a small"]
    params = [params_of(CASES[name]) for name in ("choices", "stop string for choices", "penalties", "logprobs")]
    wanted = plain.generate(prompts, params)
    guesser.texts = [result.prompt_token_ids + choice.token_ids for result in wanted for choice in result.outputs]
    results = drafting.generate(prompts, params)
    for expected, result in zip(wanted, results, strict=True):
        result.usage.cached_tokens = expected.usage.cached_tokens  # what came before differs
        same(expected, result)
    assert all(result.usage.speculation is not None and result.usage.speculation.accepted > 0 for result in results)


def test_a_stream_shows_the_same_text_in_fewer_pieces(plain: LLM, drafting: LLM, guesser: Guesser) -> None:
    params = params_of({"temperature": 0, "stop": ("nine, te",)})
    pieces = [piece for piece, _ in plain.stream_generate(COUNT, params)]
    teach(guesser, plain.generate(COUNT, params_of({"temperature": 0}))[0])
    drafted: list[str] = []
    for piece, result in drafting.stream_generate(COUNT, params):
        drafted.append(piece)
        assert result.outputs[0].text == "".join(drafted)
    assert "".join(drafted) == "".join(pieces)
    assert len(drafted) < len(pieces)


def test_a_stream_that_is_left_leaves_nothing_behind(plain: LLM, drafting: LLM, guesser: Guesser) -> None:
    params = params_of({"temperature": 0, "max_tokens": 60})
    wanted = plain.generate(COUNT, params)[0]
    teach(guesser, wanted)
    for taken in range(1, 6):
        with contextlib.closing(drafting.stream_generate(COUNT, params)) as stream:
            for _ in range(taken):
                next(stream)
        assert drafting.get_kv_cache_stats()["used_frames"] == 0
    assert drafting.generate(COUNT, params)[0].outputs == wanted.outputs


async def test_requests_side_by_side_and_cancelled_ones(smollm2_path: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other one is left in the middle of its answer."""
    guesser = Guesser()
    engines_guess_by(guesser, monkeypatch)
    monkeypatch.setenv("TOKENMILL_CHECK", "1")
    cases = [params_of(CASES[name]) for name in ("sampled", "choices", "stop string", "penalties", "logprobs", "min_tokens")]
    wanted = [plain.generate(COUNT, params)[0] for params in cases]
    guesser.texts = [result.prompt_token_ids + choice.token_ids for result in wanted for choice in result.outputs]
    async with AsyncLLM(smollm2_path, **SETTINGS) as llm:

        async def left(params: SamplingParams, outputs: int) -> None:
            async with contextlib.aclosing(llm.generate(COUNT, params)) as stream:
                for _ in range(outputs):
                    await anext(stream)

        async def whole(params: SamplingParams) -> RequestOutput:
            async for result in llm.generate(COUNT, params):
                last = result
            return last

        crowd = [left(params, i % 3 + 1) for i, params in enumerate(cases)]
        results: list[Any] = (await asyncio.gather(*crowd, *map(whole, cases)))[len(crowd) :]
        for expected, result in zip(wanted, results, strict=True):
            result.usage.cached_tokens = expected.usage.cached_tokens  # by who came first
            same(expected, result)
        assert (await llm.get_kv_cache_stats())["used_frames"] == 0


def test_a_proposer_of_the_package_is_told_by_its_name(smollm2_path: Path, plain: LLM) -> None:
    params = params_of({"temperature": 0, "max_tokens": 60})
    for method, most in (("suffix", 8), ("ngram", 3)):
        with LLM(smollm2_path, speculative_config={"method": method, "num_speculative_tokens": most}, **SETTINGS) as llm:
            assert (llm.info.proposer, llm.info.draft_model) == (method, None)
            result = llm.generate(COUNT, params)[0]
        usage = result.usage.speculation
        assert isinstance(usage, SpeculationUsage)
        assert usage.proposer == method
        assert len(usage.drafted_by_position) <= most
        assert result.outputs == plain.generate(COUNT, params)[0].outputs
