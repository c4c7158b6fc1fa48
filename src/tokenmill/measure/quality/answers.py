"""Greedy answers to a list of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenmill.core.types import SamplingParams
from tokenmill.llm import LLM, RequestOutput

TOGETHER = 4
"""Prompts that are answered at a time."""


def answers(llm: LLM, prompts: Sequence[str], max_tokens: Sequence[int]) -> Iterator[RequestOutput]:
    """Each prompt is a user's message of a conversation of its own; answers come in the order of the prompts.

    Raises `InvalidRequest` without a chat template.
    """
    for at in range(0, len(prompts), TOGETHER):
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts[at : at + TOGETHER]]
        params = [SamplingParams(temperature=0, seed=0, max_tokens=limit) for limit in max_tokens[at : at + TOGETHER]]
        yield from llm.chat(asked, params)
