"""The same threads and memory, divided in several ways."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.cluster.division import WorkerPlan, Workers, divide
from tokenmill.core.config import EngineConfig
from tokenmill.core.cpus import usable_cpus
from tokenmill.core.errors import ConfigError
from tokenmill.core.memory import available_memory
from tokenmill.core.roles import Role
from tokenmill.kv.footprint import frames_for
from tokenmill.measure.kv_model import KVModel
from tokenmill.measure.separation.demand import STREAM_PROMPT, Demand

SEPARATED = "separated"
PACED = "paced"
ARTICLE = 2048
"""Prompt tokens in a step of the article's workers."""


@dataclass(frozen=True)
class Setup:
    """config: of what its workers have in common."""

    name: str
    config: EngineConfig
    plans: Sequence[WorkerPlan]

    @property
    def separated(self) -> bool:
        return self.name == SEPARATED


def mixed_name(chunk: str | int) -> str:
    return f"mixed {chunk}"


def parse_chunks(text: str) -> list[str]:
    """Numbers of tokens, and `paced`. Raises `ConfigError`."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for part in parts:
        if part != PACED and not (re.fullmatch(r"\d{1,5}", part, re.ASCII) and 8 <= int(part) <= 16384):
            raise ConfigError(f"--chunks is {text!r}, but must be numbers between 8 and 16384 or {PACED}, such as 64,256", param="--chunks")
    return parts


def setups(
    path: Path,
    demands: Sequence[Demand],
    chunks: Sequence[str],
    prefill_chunk: int,
    threads: int,
    cpus: str | None,
    link: Mapping[str, str],
) -> list[Setup]:
    """A prefill worker and a decode worker; one mixed engine in the article's form; and one for each of `chunks` that is another.

    threads: of each setup; at least 2. link: settings of the connector between the two workers. Raises `ConfigError` if the longest
    demand exceeds the model's context or the memory.
    """
    shape = KVModel.of(path)
    longest = max(demand.longest for demand in demands)
    if longest > shape.context:
        raise ConfigError(
            f"a prompt and its answer have {longest} tokens, but the model's context is {shape.context}: lower --prompt-tokens, "
            "--answer-tokens or --stream-tokens"
        )
    budget = max(_room(shape, demand) for demand in demands) / 2**30
    shared: dict[str, Any] = {
        "model": str(path),
        "threads": threads,
        "cpus": cpus,
        "max_model_len": longest,
        "max_batch_size": max(demand.streams + demand.prompts for demand in demands),
    }
    memory = available_memory()
    if 2 * budget * 2**30 > memory:
        raise ConfigError(
            f"two workers need {2 * budget:.1f} GB of KV cache, but {memory / 2**30:.1f} GB are free: lower --prompts or --prompt-tokens"
        )
    both = EngineConfig.from_settings(**shared, kv_cache_config={"memory_budget_gb": 2 * budget}, kv_transfer_config=dict(link))
    plans = [_with_chunk(plan, prefill_chunk) for plan in divide(both, Workers(prefill=1, decode=1), usable_cpus(), memory)]
    found = [Setup(SEPARATED, both, plans)]
    for chunk in dict.fromkeys((str(ARTICLE), *chunks)):
        how: dict[str, Any] = {"scheduler": "decode_optimized"} if chunk == PACED else {"chunk_size": int(chunk)}
        alone = EngineConfig.from_settings(**shared, **how, kv_cache_config={"memory_budget_gb": budget})
        found.append(Setup(mixed_name(chunk), alone, divide(alone, Workers(mixed=1), usable_cpus(), memory)))
    return found


def _with_chunk(plan: WorkerPlan, chunk: int) -> WorkerPlan:
    """What is handed over goes chunk by chunk, so that only the last one is waited for."""
    return plan._replace(config=msgspec.structs.replace(plan.config, chunk_size=chunk)) if plan.role is Role.PREFILL else plan


def _room(shape: KVModel, demand: Demand) -> int:
    """Bytes of KV for everybody at a time."""

    def frames(length: int) -> int:
        return shape.footprint.taken(0, frames_for(length) + 1, ARTICLE)

    short, long = frames(STREAM_PROMPT + demand.stream_tokens), frames(demand.prompt_tokens + demand.answer_tokens)
    return (demand.streams * short + (demand.prompts + 1) * long + frames(demand.longest)) * shape.frame_bytes
