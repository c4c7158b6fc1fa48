"""Whether a sequence fits into the context: one rule, and one message, for every way in."""

from __future__ import annotations

from tokenmill.core.errors import ContextLengthExceeded, InvalidRequest


def room_after(prompt_tokens: int, limit: int, max_tokens: int | None = None, param: str = "prompt") -> int:
    """Tokens that may follow a prompt in a context of `limit`: `max_tokens`, or all that the context leaves.

    Raises `InvalidRequest` for an empty prompt and `ContextLengthExceeded`, with both numbers, when there is not enough room;
    `param` is the field that holds the prompt.
    """
    if not prompt_tokens:
        raise InvalidRequest(f"{param} has no tokens: the model needs at least one to begin with", param=param)
    room = limit - prompt_tokens
    if room < 1 or (max_tokens is not None and max_tokens > room):
        asked = "" if max_tokens is None else f" (max_tokens {max_tokens})"
        wanted = prompt_tokens + (1 if max_tokens is None else max_tokens)
        raise ContextLengthExceeded(
            f"prompt has {prompt_tokens} tokens, model context is {limit}{asked}, which makes {wanted} needed: "
            "shorten the prompt, ask for fewer tokens, or raise --max-model-len",
            param=param,
        )
    return room if max_tokens is None else max_tokens
