"""Drafts under a mask of allowed tokens, such as a grammar is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import Setting, serve
from drafting import METHODS, drafted
from request_pool import RequestPool
from traffic import Arrival, Request

from tokenmill.core.config import EngineConfig
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.sampling.mask import Words
from tokenmill.sampling.state import SamplerState
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.weights.vocabulary import load_tokenizer


class Alternating:
    """A mask under which digits and what parts numbers take turns. sets: uint32 words of each."""

    def __init__(self, sets: Sequence[Words]) -> None:
        self._sets = sets
        self._seen = 0

    def allowed(self) -> Words:
        return self._sets[self._seen % 2]

    def observe(self, token: int) -> None:
        assert self.allowed()[token // 32] >> token % 32 & 1, f"{token} is not allowed"
        self._seen += 1

    def retract(self, token: int) -> None:
        self._seen -= 1


@pytest.fixture
def digits_and_signs(smollm2_path: Path, pool: RequestPool, monkeypatch: pytest.MonkeyPatch) -> tuple[Tokenizer, list[Request]]:
    """Engines that are built have every sequence alternate; and requests that gladly do, and that do not."""
    tokenizer = load_tokenizer(smollm2_path)
    sets = []
    for texts in ("0123456789", (",", ";", " ", ":")):
        bits = np.zeros((pool.alone.info.vocab_size + 31) // 32 * 32, np.uint8)
        bits[[tokenizer.encode(text)[0] for text in texts]] = 1
        sets.append(np.packbits(bits, bitorder="little").view(np.uint32))
    monkeypatch.setattr("tokenmill.engine.engine.SamplerState", lambda *parts: SamplerState(*parts, Alternating(sets)))
    prompts = [tuple(tokenizer.encode(text)) for text in ("Count: 1,2,3,4,1,2,3,4,1,2,3,4,1,2,", "One, two, three. One, two,")]
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "logprobs": 1, "n": 2},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    ]
    params = [SamplingParams(seed=seed, max_tokens=40, **more) for seed, more in enumerate(settings)]
    return tokenizer, [Request(prompt, each, ()) for prompt in prompts for each in params]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("any_length", "one_mind")
def test_a_mask_sees_accepted_tokens_one_by_one(
    pool: RequestPool, smollm2_path: Path, digits_and_signs: tuple[Tokenizer, list[Request]], method: str
) -> None:
    tokenizer, requests = digits_and_signs
    mix = [Arrival(i, i, 1, "", None, None) for i in range(len(requests))]
    plain, drafting = (Setting(4, drafts=who).build(smollm2_path, {}, pool.alone.info.kv_bytes_per_token) for who in ("none", method))
    wanted, found = serve(plain, requests, mix), serve(drafting, requests, mix)
    for key, answer in found.items():
        assert re.fullmatch("([0-9][,; :]){20}", tokenizer.decode(answer.tokens))
        assert (answer.tokens, answer.logprobs) == (wanted[key].tokens, wanted[key].logprobs)
    verified, right = drafted(drafting)
    assert right > 20, (verified, right)
    assert right > 0.97 * verified or method != "draft", "the draft model goes by the same mask"


@pytest.mark.usefixtures("any_length", "one_mind")
def test_by_rejection_a_mask_holds_for_both_models(smollm2_path: Path, digits_and_signs: tuple[Tokenizer, list[Request]]) -> None:
    tokenizer, requests = digits_and_signs
    chosen = {"model": str(smollm2_path), "verify": "rejection", "num_speculative_tokens": 5}
    engine = build_engine(EngineConfig.from_settings(model=str(smollm2_path), max_batch_size=4, speculative_config=chosen))
    for answer in serve(engine, requests, [Arrival(i, i, 1, "", None, None) for i in range(len(requests))]).values():
        assert re.fullmatch("([0-9][,; :]){20}", tokenizer.decode(answer.tokens))
    verified, right = drafted(engine)
    assert right == verified > 60
