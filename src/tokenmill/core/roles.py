"""What a worker of a cluster is for."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """Of a worker: what it takes. Of a request or a part of one: what it needs.

    PREFILL computes a prompt whose request goes on elsewhere. DECODE goes on from a prompt that was computed elsewhere. MIXED, of a
    worker, takes everything; of a request, it is whole: prompt and output on one worker.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    def takes(self, wanted: Role) -> bool:
        """Whether a worker of this role is given such work. Decode workers take whole requests too: they must be able to compute a
        prompt anyway, for when a hand-over fails."""
        return self is Role.MIXED or self is wanted or (self is Role.DECODE and wanted is Role.MIXED)
