"""From what callers give (texts, token ids, conversations) to requests."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.limits import room_after
from tokenmill.core.messages import EngineInfo, Generate
from tokenmill.core.types import SamplingParams
from tokenmill.text.chat import ChatTemplate, encode_chat
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.weights.catalogue import resolve
from tokenmill.weights.vocabulary import load_tokenizer


class TokensPrompt(TypedDict):
    """A prompt as token ids, in vLLM's spelling."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TokensPrompt
Conversation = Sequence[Mapping[str, Any]]


def configure(model: str, settings: dict[str, Any]) -> EngineConfig:
    """The engine's configuration for a catalogue name or a path; pulls the model on first use."""
    settings.setdefault("served_name", model if not Path(model).exists() else Path(model).stem)
    EngineConfig.from_settings(model=model, **settings)  # a wrong setting is told before anything is fetched
    return EngineConfig.from_settings(model=str(resolve(model)), **settings)


class Frontend:
    """A model's vocabulary, chat template and limits."""

    def __init__(self, config: EngineConfig, info: EngineInfo) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(Path(config.model))
        self._info = info
        self._template = ChatTemplate(self.tokenizer.chat_template, self.tokenizer.bos_text, self.tokenizer.eos_text)

    def request(self, prompt: Prompt, params: SamplingParams, priority: int = 1, cache_salt: str = "") -> tuple[Generate, str | None]:
        """The request, and the prompt's text if it was given as one. Raises `InvalidRequest`."""
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        return self._generate(ids, params, priority, cache_salt), text

    def chat_request(self, messages: Conversation, params: SamplingParams, priority: int = 1, cache_salt: str = "") -> Generate:
        """The request for the next answer in a conversation. Raises `InvalidRequest`."""
        ids = encode_chat(self.tokenizer, self._template, [dict(m) for m in messages])
        return self._generate(ids, params, priority, cache_salt)

    def _generate(self, ids: list[int], params: SamplingParams, priority: int, cache_salt: str) -> Generate:
        params.check(self._info.vocab_size)
        room = room_after(len(ids), self._info.max_model_len, params.max_tokens)
        return Generate(
            request_id=uuid.uuid4().hex,
            prompt=ids,
            params=params.resolved(room),
            eos_ids=tuple(sorted(self.tokenizer.eos_ids)),
            priority=priority,
            cache_salt=cache_salt,
        )


def _token_ids(prompt: Sequence[int] | TokensPrompt) -> list[int]:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if not isinstance(ids, Sequence | np.ndarray) or not all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in ids):
        raise InvalidRequest(
            f"a prompt is a string, a list of token ids or {{'prompt_token_ids': [...]}}, not {type(prompt).__name__}", param="prompt"
        )
    return [int(t) for t in ids]


def many_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if len(prompts) and all(isinstance(p, int | np.integer) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def params_for(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters of each of `count` prompts."""
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(f"there are {count} prompts, but {len(given)} sampling parameters: give one for all, or one each", param="sampling_params")
    return list(given)
