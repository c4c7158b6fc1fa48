"""What clients ask, and the answers that an engine gives to it that nobody disturbs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from traffic import SENTENCES

from tokenmill.core.types import SamplingParams
from tokenmill.llm.offline import LLM

CONTEXT = 1800
"""Tokens of the longest prompt and its answer, at most."""


class Answer(NamedTuple):
    """Of one choice."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str


class Question(NamedTuple):
    """A prompt of token ids, how it is to be gone on with, and each choice's answer."""

    prompt: tuple[int, ...]
    params: SamplingParams
    answers: tuple[Answer, ...]

    def body(self, salt: str) -> dict[str, Any]:
        """As a request for `/v1/completions` with everything but `model` and `stream`."""
        params = self.params
        return {
            "prompt": list(self.prompt),
            "n": params.n,
            "seed": params.seed,
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "ignore_eos": params.ignore_eos,
            "return_token_ids": True,
            "cache_salt": salt,
        }


def draw_questions(model: Path, seed: int, count: int) -> list[Question]:
    """Many begin alike; the lengths of prompts are from 5 to 1,500 tokens, those of answers from 1 to 100."""
    rng = random.Random(seed)
    with LLM(str(model), max_model_len=CONTEXT) as llm:
        documents = [llm.tokenizer.encode(" ".join(rng.choices(SENTENCES, k=160))) for _ in range(3)]
        prompts = [_prompt(rng, documents) for _ in range(count)]
        params = [_params(rng) for _ in range(count)]
        results = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    questions = []
    for prompt, own, result in zip(prompts, params, results, strict=True):
        answers = tuple(Answer(each.text, tuple(each.token_ids), each.finish_reason or "") for each in result.outputs)
        questions.append(Question(prompt, own, answers))
    return questions


def _prompt(rng: random.Random, documents: Sequence[Sequence[int]]) -> tuple[int, ...]:
    low, high = rng.choices(((5, 60), (60, 300), (300, 1501)), weights=(5, 4, 2))[0]
    length = rng.randrange(low, high)
    document = rng.choice(documents)
    common = min(length, rng.choice((8, 64, 200, 600)))
    start = rng.randrange(len(document) - length)
    return tuple(document[:common]) + tuple(document[start : start + length - common])


def _params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        n=rng.choice((1, 1, 1, 2)),
        seed=rng.randrange(2**63),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0, 1.3)),
        max_tokens=rng.choice((1, 2, rng.randrange(1, 30), rng.randrange(10, 101), rng.randrange(30, 101))),
        ignore_eos=rng.random() < 0.7,
    )
