"""What an engine tells of the blocks that it fills."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from tokenmill.core.blocks import BLOCK, block_hashes
from tokenmill.core.config import KVStoreConfig, KVTransferConfig
from tokenmill.engine.filling import FRAMES, Block

Talk = Any
"""conftest.py"""
Build = Callable[..., Talk]


def telling(build: Build, **settings: Any) -> Talk:
    return build(kv_store_config=KVStoreConfig(folder="/nowhere"), **settings)


def steps(talk: Talk) -> tuple[list[Block], dict[bytes, bytes]]:
    """Step until nothing is left; the blocks that were told, and the bytes of each when it was."""
    assert talk.engine.filling is not None
    told: list[Block] = []
    contents: dict[bytes, bytes] = {}
    while talk.engine.has_work:
        talk.finish_step()
        for block in talk.engine.filling.take():
            told.append(block)
            contents[block.key] = talk.engine.memory.frames([array("i", group) for group in block.frames]).gather().tobytes()
        talk.engine.start_step()
    return told, contents


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 499) for _ in range(length)]


@pytest.mark.parametrize("chunk", [8, 56, 64, 200, 512])
def test_each_block_is_told_once_under_the_name_of_its_tokens_whatever_the_chunks(build: Build, chunk: int) -> None:
    expected, contents = steps(asked(telling(build), prompt(300)))
    told, same = steps(asked(telling(build, chunk_size=chunk), prompt(300)))
    assert [block.key for block in told] == [block.key for block in expected]
    assert same == contents


def asked(talk: Talk, tokens: list[int], **settings: Any) -> Talk:
    talk.add("a", tokens, **({"max_tokens": 90, "ignore_eos": True} | settings))
    return talk


def test_prompt_and_output_have_chained_names(build: Build) -> None:
    talk = telling(build)
    told, _ = steps(asked(talk, prompt(100)))
    tokens = prompt(100) + talk.answers["a", 0].tokens
    names = block_hashes(tokens[:-1], "", talk.engine.info.fingerprint)  # the last token is never computed
    assert [block.key for block in told] == names
    assert [block.parent for block in told] == [None, *names[:-1]]
    assert {len(group) for block in told for group in block.frames} == {FRAMES}


def test_what_was_found_in_the_prefix_cache_is_not_told_again(build: Build) -> None:
    talk = telling(build)
    steps(asked(talk, prompt(200), max_tokens=1))
    talk.answers.clear()
    told, _ = steps(asked(talk, [*prompt(200), *prompt(80, seed=2)], max_tokens=1))
    assert len(told) == 280 // BLOCK - 200 // BLOCK


def test_whoever_is_preempted_tells_nothing_twice(build: Build) -> None:
    talk = telling(build, frames=60)
    for number in range(4):
        talk.add(f"r{number}", prompt(90, seed=number), max_tokens=60, ignore_eos=True)
    told, _ = steps(talk)
    assert talk.engine.stats().preemptions > 0
    assert len({block.key for block in told}) == len(told) == 4 * (149 // BLOCK)


def test_a_router_knows_what_the_cache_has(build: Build) -> None:
    """However much of it has been evicted: as far as a text's names are known, so far its frames are found."""
    rng = random.Random(3)
    talk = build(frames=70, kv_transfer_config=KVTransferConfig())
    engine = talk.engine
    assert engine.filling is not None
    known: set[bytes] = set()
    texts: list[list[int]] = []
    for number in range(60):
        text = prompt(rng.randrange(40, 300), seed=number)
        if texts and rng.random() < 0.5:
            before = rng.choice(texts)
            text = before[: rng.randrange(len(before))] + text[:60]
        talk.add("a", text, max_tokens=rng.randrange(1, 80), ignore_eos=True)
        text = text + talk.finish()["a", 0].tokens
        texts.append(text[:-1])  # the last token is never computed
        chains, evicted = engine.filling.news()
        known.difference_update(evicted)
        known.update(*chains)
        for each in texts:
            names = block_hashes(each, "", engine.info.fingerprint)
            deep = next((at for at, name in enumerate(names) if name not in known), len(names))
            found = engine._scheduler.kv.match([*each, 1], "").frames * 8 // BLOCK
            assert deep == found, number
    assert engine.stats().evictions > 100
    assert engine.filling.take() == [], "nothing is kept for a store that there is not"


def test_an_engine_that_nobody_asks_tells_nothing(build: Build) -> None:
    assert build().engine.filling is None


def test_how_fast_prompts_are_computed_is_told(build: Build) -> None:
    talk = telling(build)
    steps(asked(talk, prompt(200), max_tokens=5))
    assert talk.engine.filling is not None
    tokens, seconds = talk.engine.filling.pace()
    assert (tokens, seconds > 0) == (200, True)
    assert talk.engine.filling.pace() == (0, 0.0)
