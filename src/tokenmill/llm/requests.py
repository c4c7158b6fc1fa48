"""From what callers give (texts, token ids, conversations) to requests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import numpy as np

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError, InvalidRequest
from tokenmill.core.limits import room_after
from tokenmill.core.messages import EngineInfo, Generate
from tokenmill.core.types import Priority, SamplingParams
from tokenmill.text.chat import ChatTemplate, encode_chat
from tokenmill.text.templates import ChosenTemplate
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.weights.catalogue import resolve, with_draft
from tokenmill.weights.vocabulary import load_tokenizer


class TextPrompt(TypedDict):
    """A prompt as text, in vLLM's spelling."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, in vLLM's spelling."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Conversation = Sequence[Mapping[str, Any]]


def configure(model: str | os.PathLike[str], settings: dict[str, Any]) -> EngineConfig:
    """The engine's configuration for a catalogue name or a path; pulls the model on first use."""
    if settings.get("kv_transfer_config") is not None:
        raise ConfigError(
            "kv_transfer_config is for workers, which hand over to each other, and the engine of an LLM or AsyncLLM is in the calling "
            "process, alone: leave it out, or start workers with `tokenmill serve --prefill N --decode N` or PDRouter",
            param="kv_transfer_config",
        )
    if settings.get("kv_store_config") is not None:
        raise ConfigError(
            "kv_store_config is for workers, which share a store and outlive each other, and the engine of an LLM or AsyncLLM is in the "
            "calling process, alone: leave it out, or start a worker with `tokenmill serve --kv-store URL`",
            param="kv_store_config",
        )
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    config = EngineConfig.from_settings(model=name, **settings)  # a wrong setting is told before anything is fetched
    path = resolve(config.model)
    own_name = None if path == Path(config.model).expanduser() else config.model
    return msgspec.structs.replace(with_draft(config), model=str(path), served_name=config.served_name or own_name)


class Frontend:
    """A model's vocabulary, chat template and limits."""

    def __init__(self, config: EngineConfig, info: EngineInfo, chosen: ChosenTemplate | None) -> None:
        """chosen: the template to use instead of the model's own."""
        self.tokenizer: Tokenizer = load_tokenizer(Path(config.model))
        self._info = info
        self._ends = chosen.ends if chosen else ()
        self.can_chat = chosen is not None or self.tokenizer.chat_template is not None
        if chosen is not None:
            self._template = chosen.bind(self.tokenizer)
        else:
            self._template = ChatTemplate(self.tokenizer.chat_template, self.tokenizer.bos_text, self.tokenizer.eos_text)

    def request(self, prompt: Prompt, params: SamplingParams, priority: int = 1, cache_salt: str = "") -> tuple[Generate, str | None]:
        """The request, and the prompt's text if it was given as one. Raises `InvalidRequest`."""
        given = _text_or_ids(prompt)
        if isinstance(given, str):
            return self._generate(self.tokenizer.encode(given), params, priority, cache_salt), given
        return self._generate(given, params, priority, cache_salt), None

    def chat_request(
        self, messages: Conversation, params: SamplingParams, priority: int = 1, cache_salt: str = ""
    ) -> tuple[Generate, str | None]:
        """The request for the next answer in a conversation. Raises `InvalidRequest`."""
        ids = self.chat_ids(messages)
        if self._ends:
            params = msgspec.structs.replace(params, stop=(*params.stop, *self._ends))
        return self._generate(ids, params, priority, cache_salt), None

    def chat_ids(self, messages: Conversation) -> list[int]:
        """Token ids of a conversation, ready for the next answer. Raises `InvalidRequest`."""
        if not self.can_chat:
            raise InvalidRequest(
                f"{self._info.model} has no chat template: complete a text instead, or choose a template (chat_template='chatml')",
                param="messages",
                code="no_chat_template",
            )
        return encode_chat(self.tokenizer, self._template, messages)

    def _generate(self, ids: list[int], params: SamplingParams, priority: int, cache_salt: str) -> Generate:
        if priority not in tuple(Priority):
            raise InvalidRequest(f"priority is {priority!r}, but must be 0 (first), 1 or 2 (last)", param="priority")
        if not isinstance(cache_salt, str):
            raise InvalidRequest(f"cache_salt must be a string, not {type(cache_salt).__name__}", param="cache_salt")
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


def many_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping) or _are_ids(prompts):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise _no_prompt(prompts)
    return list(prompts)  # type: ignore[arg-type]


def many_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or several, as a list; what is neither is left to the check of its messages."""
    if isinstance(messages, Sequence) and messages and all(isinstance(part, list | tuple) for part in messages):
        return list(messages)  # type: ignore[arg-type]
    return [messages]  # type: ignore[list-item]


def many_params(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters of each of `count` prompts, checked as by `one_params`."""
    if not isinstance(given, Sequence):
        return [one_params(given)] * count
    if len(given) != count:
        raise InvalidRequest(
            f"there are {count} prompts, but {len(given)} sampling parameters: give one for all, or one each", param="sampling_params"
        )
    return [one_params(params) for params in given]


def one_params(given: SamplingParams | None) -> SamplingParams:
    """`given`, or the defaults. A struct does not check its fields, so it is done here; a lone stop string is one stop
    string, not its letters. Raises `InvalidRequest` for a value of the wrong type."""
    if given is None:
        return SamplingParams()
    if not isinstance(given, SamplingParams):
        raise InvalidRequest(f"sampling_params must be SamplingParams, not {type(given).__name__}", param="sampling_params")
    values = msgspec.structs.asdict(given)
    if isinstance(given.stop, str):
        values["stop"] = (given.stop,)
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling_params: {error}", param="sampling_params") from None


def _text_or_ids(prompt: Prompt) -> str | list[int]:
    given: Any = prompt
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise _no_prompt(prompt)
        given = next(iter(prompt.values()))
        if isinstance(given, str) != ("prompt" in prompt):
            raise _no_prompt(prompt)
    if isinstance(given, str):
        return given
    if not _are_ids(given) and given != []:
        raise _no_prompt(prompt)
    return [int(token) for token in given]


def _are_ids(value: object) -> bool:
    """Whether it is a sequence of at least one integer; bytes and booleans are none."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.size > 0 and np.issubdtype(value.dtype, np.integer)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        return False
    return len(value) > 0 and all(isinstance(part, int | np.integer) and not isinstance(part, bool) for part in value)


def _no_prompt(given: object) -> InvalidRequest:
    shown = f"{{{', '.join(map(repr, given))}}}" if isinstance(given, Mapping) else type(given).__name__
    return InvalidRequest(
        f"a prompt is a string, a list of token ids, {{'prompt': text}} or {{'prompt_token_ids': ids}}, not {shown}", param="prompt"
    )
