"""Users with one system prompt and a question each: what prefix sharing saves in memory, and in time to the first token."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.core.errors import ConfigError
from tokenmill.core.memory import available_memory
from tokenmill.core.types import SamplingParams
from tokenmill.kv.footprint import frames_for
from tokenmill.llm import AsyncLLM
from tokenmill.llm.outputs import RequestOutput
from tokenmill.measure.costs import Costs
from tokenmill.measure.kv_model import CHUNK, KVModel
from tokenmill.measure.plot import Bars
from tokenmill.measure.report import Ceilings, Column, Row, Table

ROUNDS = 3
"""System prompts for which users come one by one."""

STRATEGIES = ("none", "radix")


@dataclass(frozen=True)
class Users:
    """`count` users; each prompt is `shared` tokens that all have and `own` that nobody else has."""

    count: int
    shared: int
    own: int
    seed: int

    @property
    def prompt(self) -> int:
        return self.shared + self.own

    @property
    def answer(self) -> int:
        """Tokens that an answer can have before the last user's begins, one per step, and a reserve."""
        return -(-self.count * self.prompt // CHUNK) + self.count + 256

    @property
    def length(self) -> int:
        """The most tokens that a user's prompt and answer have."""
        return self.prompt + self.answer

    def prompts(self, vocab: int, number: int) -> list[list[int]]:
        """Random tokens; each number has a system prompt of its own."""
        rng = np.random.default_rng((self.seed, number))
        shared = rng.integers(0, vocab, self.shared).tolist()
        return [shared + rng.integers(0, vocab, self.own).tolist() for _ in range(self.count)]


def sharing_table() -> Table:
    columns = (
        Column("sharing", "sharing"),
        Column("arrival", "arrival"),
        Column("kv_bytes", "KV MB", 1e6, 1),
        Column("saved_bytes", "saved MB", 1e6, 1),
        Column("once", "stored once %", 0.01, 1),
        Column("first", "TTFT first ms", 1e-3, 1),
        Column("floor", "floor ms", 1e-3, 1),
        Column("ratio", "ratio", 1, 2),
        Column("others", "others ms", 1e-3, 1),
        Column("last", "last ms", 1e-3, 1),
        Column("others_to_first", "others/first", 1, 3),
    )
    return Table("sharing", "users with one system prompt", columns)


async def measure_sharing(
    path: Path, users: Users, budget: float, ceilings: Ceilings, threads: int, cpus: str | None
) -> AsyncIterator[Row]:
    """All at once without and with sharing; then, with it, one by one. budget: what `room` says."""
    floor = Costs.of(path).prefill_floor(ceilings, [users.prompt])
    for strategy in STRATEGIES:
        llm = await asyncio.to_thread(
            AsyncLLM,
            path,
            threads=threads,
            cpus=cpus,
            max_model_len=users.length,
            max_batch_size=users.count,
            chunk_size=CHUNK,
            block_manager_config={"prefix_sharing_strategy": strategy},
            kv_cache_config={"memory_budget_gb": budget},
        )
        async with llm:
            await _first_token(llm, users.prompts(llm.info.vocab_size, 0)[0][: CHUNK // 8])
            results, cache = await _together(llm, users.prompts(llm.info.vocab_size, 1), users.answer)
            yield _row(strategy, "together", [sorted(results, key=_ttft)], users, floor) | {
                "kv_bytes": cache["bytes_by_format"][llm.info.kv_format]["used"],
                "saved_bytes": cache["saved_by_sharing_gb"] * 2**30,
            }
            if strategy == "radix":
                rounds = [users.prompts(llm.info.vocab_size, 2 + number) for number in range(ROUNDS)]
                answers = [[await _first_token(llm, prompt) for prompt in prompts] for prompts in rounds]
                yield _row(strategy, "one by one", answers, users, floor)


def room(model: KVModel, users: Users) -> float:
    """GB of KV for all users without sharing. Raises `ConfigError` if they are too long, or there is not so much."""
    length = users.length
    if length > model.context:
        raise ConfigError(
            f"prompts of {users.prompt} tokens and answers beside {users.count - 1} others take {length}, but the model's context is "
            f"{model.context}: lower --prompt-tokens, --question-tokens or --users"
        )
    need = users.count * model.footprint.taken(0, frames_for(length) + 1, CHUNK) * model.frame_bytes
    free = available_memory()
    if need > free:
        raise ConfigError(
            f"{users.count} users of {length} tokens need {need / 2**30:.1f} GB of KV cache without sharing, but {free / 2**30:.1f} GB "
            "are free: lower --users or --prompt-tokens"
        )
    return need / 2**30


async def _first_token(llm: AsyncLLM, prompt: list[int]) -> RequestOutput:
    [result] = [result async for result in llm.generate({"prompt_token_ids": prompt}, _params(1)) if result.finished]
    return result


async def _together(llm: AsyncLLM, prompts: Sequence[list[int]], answer: int) -> tuple[list[RequestOutput], dict[str, Any]]:
    """All users at once, and the cache when each has had a token and none has ended."""
    streams = [llm.generate({"prompt_token_ids": prompt}, _params(answer)) for prompt in prompts]
    results = await asyncio.gather(*map(_until_token, streams))
    cache = await llm.get_kv_cache_stats()
    for stream in streams:
        await stream.aclose()
    return results, cache


async def _until_token(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    return await anext(result async for result in stream if result.metrics.ttft is not None)


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=tokens)


def _row(strategy: str, arrival: str, rounds: Sequence[Sequence[RequestOutput]], users: Users, floor: float) -> Row:
    """Medians over rounds and users. In a round the first result is the one that came first, and found nothing."""
    first = statistics.median(_ttft(results[0]) for results in rounds)
    others = [_ttft(result) for results in rounds for result in results[1:]]
    once = [min(result.usage.cached_tokens, users.shared) / users.shared for results in rounds for result in results[1:]]
    return {
        "sharing": strategy,
        "arrival": arrival,
        "users": users.count,
        "shared": users.shared,
        "own": users.own,
        "once": statistics.mean(once),
        "first": first,
        "floor": floor,
        "ratio": floor / first,
        "others": statistics.median(others),
        "last": max(others),
        "others_to_first": statistics.median(others) / first,
    }


def _ttft(result: RequestOutput) -> float:
    assert result.metrics.ttft is not None, "a user has had no token"
    return result.metrics.ttft


def charts(table: Table) -> list[Bars]:
    """Memory with and without sharing, and times to the first token."""
    held = [row for row in table.rows if row.get("kv_bytes") is not None]
    memory = {"MB": [float(row["kv_bytes"] or 0) / 1e6 for row in held]}
    times = {key: [1e3 * float(row[key] or 0) for row in table.rows] for key in ("first", "others", "last")}
    return [
        Bars("KV cache of all users", "MB", [str(row["sharing"]) for row in held], memory),
        Bars("time to first token", "milliseconds", [f"{row['sharing']}, {row['arrival']}" for row in table.rows], times),
    ]
