"""Log-probabilities in the two formats of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tokenmill.core.types import TokenLogprobs
from tokenmill.gateway.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from tokenmill.text.output import Delta
    from tokenmill.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> ChatLogprobs | None:
    """The entries of a delta; None when log-probabilities were not asked for."""
    if delta.logprobs is None:
        return None
    return ChatLogprobs(content=[_chat_entry(tokenizer, position) for position in delta.logprobs])


def completion_logprobs(tokenizer: Tokenizer, delta: Delta, before: int) -> CompletionLogprobs | None:
    """The entries of a delta. `before`: characters of the choice's text in front of the generated text."""
    if delta.logprobs is None:
        return None
    return _completion_entries(tokenizer, delta.tokens, delta.logprobs, [before + offset for offset in delta.offsets])


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], text: str, positions: Sequence[TokenLogprobs | None]
) -> CompletionLogprobs:
    """The entries of an echoed prompt; the first token has no log-probability."""
    assert len(positions) == len(prompt), f"{len(positions)} log-probabilities for {len(prompt)} prompt tokens"
    return _completion_entries(tokenizer, prompt, positions, prompt_offsets(tokenizer, prompt, text))


def prompt_offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in its `text`. A special token that the text does not write, such as a begin
    token that encoding put in front, has no width."""
    from tokenmill.text.detokenizer import Detokenizer

    detokenizer = Detokenizer(tokenizer, skip_special=False)
    offsets, position = [], 0
    for token in prompt:
        offsets.append(position)
        if tokenizer.is_special(token):
            written = tokenizer.token_bytes(token).decode("utf-8", "replace")
            position += len(written) if text.startswith(written, position) else 0
        else:
            position += len(detokenizer.push(token))
    return offsets


def join(parts: Iterable[CompletionLogprobs | None]) -> CompletionLogprobs | None:
    """Entries in sequence; None when there are none at all."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    return CompletionLogprobs(
        tokens=[token for part in given for token in part.tokens],
        token_logprobs=[value for part in given for value in part.token_logprobs],
        top_logprobs=[top for part in given for top in part.top_logprobs],
        text_offset=[offset for part in given for offset in part.text_offset],
    )


def _chat_entry(tokenizer: Tokenizer, position: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(
        token=_spelled(tokenizer, position.token),
        logprob=_finite(position.logprob),
        bytes=_bytes(tokenizer, position.token),
        top_logprobs=[_alternative(tokenizer, token, value) for token, value in position.top],
    )


def _alternative(tokenizer: Tokenizer, token: int, value: float) -> TopLogprob:
    return TopLogprob(token=_spelled(tokenizer, token), logprob=_finite(value), bytes=_bytes(tokenizer, token))


def _completion_entries(
    tokenizer: Tokenizer, tokens: Sequence[int], positions: Sequence[TokenLogprobs | None], offsets: list[int]
) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_spelled(tokenizer, token, "bytes:") for token in tokens],
        token_logprobs=[None if position is None else _finite(position.logprob) for position in positions],
        top_logprobs=[None if position is None else _top(tokenizer, position) for position in positions],
        text_offset=offsets,
    )


def _top(tokenizer: Tokenizer, position: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens and the token itself. Of two tokens that are spelled alike the likelier one stands."""
    top: dict[str, float] = {}
    for token, value in (*position.top, (position.token, position.logprob)):
        top.setdefault(_spelled(tokenizer, token, "bytes:"), _finite(value))
    return top


def _spelled(tokenizer: Tokenizer, token: int, mark: str = "") -> str:
    """A token as text; one that is only a part of a character as `\\xNN` escapes behind `mark`."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in data)


def _bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    return None if tokenizer.is_special(token) else list(tokenizer.token_bytes(token))


def _finite(value: float) -> float:
    return max(value, LOWEST)
