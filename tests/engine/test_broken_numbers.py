"""A model whose numbers are broken for one token, beside sequences that do not hold it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import TinyModel

from tokenmill.core.types import FinishReason

BAD = 7


@pytest.fixture(scope="module")
def half_broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = TinyModel(vocab=499, context=8192, tied=False)
    model.tensors["token_embd.weight"][BAD] = np.nan
    return model.write(tmp_path_factory.mktemp("model") / "broken.gguf")


def test_a_sequence_without_a_next_token_ends_and_the_others_do_not_notice(half_broken: Path, build: Callable[..., Any]) -> None:
    talk = build(model=half_broken)
    alone = talk.ask([1, 2, 3], logprobs=2)
    talk.add("good", [1, 2, 3], logprobs=2)
    talk.add("bad", [4, BAD, 5], logprobs=2)
    answers = talk.finish()
    assert answers["bad", 0].finish_reason is FinishReason.BROKEN
    assert answers["bad", 0].tokens == []
    assert answers["good", 0].tokens == alone.tokens
    assert answers["good", 0].logprobs == alone.logprobs


def test_every_choice_of_a_broken_request_ends(half_broken: Path, build: Callable[..., Any]) -> None:
    talk = build(model=half_broken)
    talk.add("bad", [*range(10, 40), BAD, 5], n=3, temperature=1.0)
    assert {answer.finish_reason for answer in talk.finish().values()} == {FinishReason.BROKEN}
