"""What a client of the workers still waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tokenmill.core.errors import TokenmillError
from tokenmill.core.messages import Generate, SequenceOutput

_Choice = tuple[str, int]


class Feed:
    """What has arrived for some requests, in order, and which of their choices are still to come."""

    def __init__(self, requests: Sequence[Generate]) -> None:
        self._queue: asyncio.Queue[SequenceOutput | TokenmillError | None] = asyncio.Queue()  # None only wakes who waits
        self.open: set[_Choice] = {(request.request_id, choice) for request in requests for choice in request.choices}

    def put(self, item: SequenceOutput | TokenmillError) -> None:
        self._queue.put_nowait(item)

    def close(self, request_id: str, choice: int | None) -> None:
        """Wait no longer for a choice, or all of a request."""
        if choice is None:
            self.open = {key for key in self.open if key[0] != request_id}
        else:
            self.open.discard((request_id, choice))
        self._queue.put_nowait(None)

    async def next(self) -> SequenceOutput | None:
        """The next output of a choice that is open; None once there is none open. Raises what was put in as an error."""
        while self.open:
            item = await self._queue.get()
            if isinstance(item, TokenmillError):
                self.open.clear()
                raise item
            if item is not None and (key := (item.request_id, item.choice)) in self.open:
                if item.finish_reason is not None:
                    self.open.discard(key)
                return item
        return None
