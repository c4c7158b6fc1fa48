"""From a text to the pieces that are read one at a time. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.core.errors import ConfigError


def cut_windows(tokens: Sequence[int], start: Sequence[int], total: int, window: int, name: str) -> list[list[int]]:
    """Windows of `window` tokens, together at least `total`, at equal distances over all of `tokens`, without overlap.

    start: what the model expects before a text, such as a begin token; it takes its place in each window. Raises `ConfigError` if
    the text is too short.
    """
    count = -(-total // window)
    fresh = window - len(start)
    if count * fresh > len(tokens):
        raise ConfigError(
            f"the text {name} has {len(tokens)} tokens, but {count} windows of {window} need {count * fresh}: lower --tokens or --window",
            param="--tokens",
        )
    stride = len(tokens) // count
    return [[*start, *tokens[i * stride : i * stride + fresh]] for i in range(count)]
