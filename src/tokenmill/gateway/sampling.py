"""Request fields to sampling parameters."""

from __future__ import annotations

import re
from typing import Any

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.types import Priority, SamplingParams
from tokenmill.gateway.schemas import GenerationRequest

MAX_SESSION = 256
"""Characters of a session's name."""

_SESSION_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_SESSION}}}")

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "seed", "ignore_eos", "min_tokens", "skip_special_tokens", "include_stop_str_in_output", "max_tokens",
    "kv_budget_mb",
)  # fmt: skip


def sampling_params(request: GenerationRequest, vocab_size: int, **own: Any) -> SamplingParams:
    """The parameters of a request; `own` holds those whose fields differ between the routes.

    Raises `InvalidRequest` naming the first field out of range.
    """
    values: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if request.stop is not None:
        values["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids is not None:
        values["stop_token_ids"] = tuple(request.stop_token_ids)
    values.update((name, value) for name, value in own.items() if value is not None)
    return SamplingParams(**values).check(vocab_size)


def priority(request: GenerationRequest) -> int:
    """The request's priority, checked."""
    if request.priority is None:
        return Priority.NORMAL
    if request.priority not in list(Priority):
        raise InvalidRequest(f"priority is {request.priority}, but must be 0 (VIP), 1 (normal) or 2 (background)", param="priority")
    return request.priority


def session(request: GenerationRequest, header: str | None) -> str | None:
    """By which requests are kept on one worker: what `X-Session-Id` says, else `prompt_cache_key`. The header comes first: a proxy
    or an agent that sets it knows the conversation, while the key may be that of a prefix that many have."""
    if header is not None and _SESSION_ID.fullmatch(header) is None:
        raise InvalidRequest(f"X-Session-Id must be 1 to {MAX_SESSION} printable ASCII characters without spaces", param="X-Session-Id")
    key = request.prompt_cache_key
    if key is not None and not 1 <= len(key) <= MAX_SESSION:
        raise InvalidRequest(
            f"prompt_cache_key has {len(key)} characters, but must have 1 to {MAX_SESSION}: leave it out, or send a digest of it",
            param="prompt_cache_key",
        )
    return key if header is None else header


def check_stream_options(request: GenerationRequest) -> None:
    """Raise `InvalidRequest` for options that could have no effect."""
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise InvalidRequest("stream_options has an effect only with stream true: leave it out, or stream", param="stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise InvalidRequest("continuous_usage_stats needs include_usage true beside it", param="stream_options.continuous_usage_stats")
