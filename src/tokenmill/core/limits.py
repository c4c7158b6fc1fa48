"""Whether a sequence fits into the context: one rule, and one message, for every way in."""

from __future__ import annotations

from tokenmill.core.errors import ContextLengthExceeded


def room_after(prompt_tokens: int, limit: int, max_tokens: int | None = None, param: str = "prompt") -> int:
    """Tokens that may follow a prompt in a context of `limit`: `max_tokens`, or all that the context leaves.

    Raises `ContextLengthExceeded` with both numbers, naming the field at fault, when there is not enough room.
    """
    room = limit - prompt_tokens
    if room >= 1 and (max_tokens is None or max_tokens <= room):
        return room if max_tokens is None else max_tokens
    asked = "at least 1" if max_tokens is None else str(max_tokens)
    raise ContextLengthExceeded(
        f"prompt has {prompt_tokens} tokens, model context is {limit} (max_tokens {asked}): shorten the prompt, lower max_tokens "
        "or raise --max-model-len",
        param=param if room < 1 else "max_tokens",
    )
