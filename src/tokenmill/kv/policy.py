"""Which page size to take: a pure choice."""

from __future__ import annotations

GROWTH = ((4096, 8), (1024, 4), (512, 2))
"""From that many tokens of context on, a sequence that grows takes pages of that many frames.

Positions that are taken but not yet filled are on average below 1.5% of the sequence's own, while the number of extents that a
kernel walks grows much slower than the context.
"""


def page_frames(need: int, spare: int, context: int, smallest: int, largest: int) -> int:
    """Return the page to take next, in frames (1, 2, 4 or 8).

    need: frames that are wanted now (a run of known length; the largest page that fits into it is taken).
    spare: frames beyond `need` that may be taken so that growth gets a larger page.
    context: the sequence's length in tokens. smallest, largest: bounds in frames; `spare` is the stronger one.
    """
    assert need > 0, "no page is needed"
    run = 1 << (need.bit_length() - 1)
    growth = next((frames for tokens, frames in GROWTH if context >= tokens), 1)
    page = min(max(run, growth, smallest), largest)
    while page > need + spare:
        page //= 2
    return page
