"""The prefill worker's part: frames that stay where they are until somebody has copied them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tokenmill.core.errors import TokenmillError, Unavailable
from tokenmill.core.handover import Prefill, Ready, Refused, Release, Taken, Ticket, full_positions, token_hash, tokens_of
from tokenmill.core.messages import Failed
from tokenmill.worker.handover.effects import Compute, Drop, End, LeaseEffect, Send


class Chunk(NamedTuple):
    """What the engine has just computed of a prompt. start, stop: whole frames. frames: numbers, for each KV group as many as
    `frames_of_chunk` says. checksum: of their bytes."""

    start: int
    stop: int
    frames: tuple[tuple[int, ...], ...]
    checksum: bytes


class Source(NamedTuple):
    """This process, as its tickets name it. boot: of the process. address: of its connector."""

    boot: str
    fingerprint: str
    address: str


class Lease(msgspec.Struct, frozen=True):
    """One prompt's frames.

    limit: where its full frames end. position: up to where they are on tickets. tickets: how many there are. taken: how many of them
    the other worker has copied. wanted: whether it still copies. computed: whether the prompt is, so that only the lease keeps its
    frames. deadline: when it ends if no other chunk is taken until then; None before `computed`.
    """

    prefill: Prefill
    limit: int
    position: int
    tickets: int = 0
    taken: int = 0
    wanted: bool = True
    computed: bool = False
    deadline: float | None = None

    @property
    def end(self) -> End | None:
        """Why it is over, if it is."""
        if not self.computed:
            return None
        if not self.wanted:
            return "refused"
        return "taken" if self.taken == self.tickets else None


class Leases:
    """All leases of one worker, by nonce. Times are seconds on any one clock."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._leases: dict[bytes, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def prefill(self, message: Prefill) -> list[LeaseEffect]:
        """The gateway asks for a prompt."""
        generate = message.generate
        if message.nonce in self._leases:
            error = Unavailable("the prompt of this reservation is being computed already: it is tried in another way")
            return [Send(Failed.of(error, generate.request_id, generate.epoch))]
        limit = full_positions(len(tokens_of(message.generate)))
        self._leases[message.nonce] = Lease(message, limit, min(message.start, limit))
        return [Compute(message)]

    def rejected(self, nonce: bytes, error: TokenmillError) -> list[LeaseEffect]:
        """The engine did not take the prompt."""
        generate = self._leases.pop(nonce).prefill.generate
        return [Send(Failed.of(error, generate.request_id, generate.epoch))]

    def failed(self, nonce: bytes, error: TokenmillError) -> list[LeaseEffect]:
        """The engine cannot go on with the prompt."""
        lease = self._leases.get(nonce)
        if lease is None:
            return []
        generate = lease.prefill.generate
        return [*self._drop(nonce, "failed"), Send(Failed.of(error, generate.request_id, generate.epoch))]

    def next_chunk(self, nonce: bytes, computed: int) -> tuple[int, int] | None:
        """The positions [start, stop) that can be handed over now that so many are computed, if there are any."""
        lease = self._leases.get(nonce)
        if lease is None or not lease.wanted:
            return None
        stop = min(full_positions(computed), lease.limit)
        return (lease.position, stop) if stop > lease.position else None

    def chunk_computed(self, nonce: bytes, chunk: Chunk) -> list[LeaseEffect]:
        """What `next_chunk` asked for has its checksum and can be read from now on."""
        lease = self._leases.get(nonce)
        if lease is None or not lease.wanted:
            return []
        assert chunk.start == lease.position, f"chunk from {chunk.start}, but tickets end at {lease.position}"
        assert lease.position < chunk.stop <= lease.limit, f"chunk [{chunk.start}, {chunk.stop}) of {lease.limit} positions"
        ticket = self._ticket(lease, chunk)
        self._leases[nonce] = msgspec.structs.replace(lease, position=chunk.stop, tickets=lease.tickets + 1)
        return [Send(Ready(ticket))]

    def prompt_computed(self, nonce: bytes, now: float) -> list[LeaseEffect]:
        """The prompt is computed and its token drawn. To be told after all its chunks and before the token is sent."""
        lease = self._leases.get(nonce)
        if lease is None:
            return []
        assert not lease.wanted or lease.position == lease.limit, f"tickets end at {lease.position} of {lease.limit} positions"
        return self._keep(nonce, msgspec.structs.replace(lease, computed=True, deadline=now + lease.prefill.expiry))

    def taken(self, message: Taken, now: float) -> list[LeaseEffect]:
        """The decode worker has copied a chunk."""
        lease = self._leases.get(message.nonce)
        if lease is None or not lease.taken <= message.chunk < lease.tickets:
            return []
        deadline = now + lease.prefill.expiry if lease.computed else None
        return self._keep(message.nonce, msgspec.structs.replace(lease, taken=message.chunk + 1, deadline=deadline))

    def refused(self, message: Refused) -> list[LeaseEffect]:
        """The decode worker will copy no more."""
        lease = self._leases.get(message.nonce)
        if lease is None:
            return []
        return self._keep(message.nonce, msgspec.structs.replace(lease, wanted=False))

    def release(self, message: Release) -> list[LeaseEffect]:
        """The gateway ends an attempt. Nothing if it has no lease."""
        attempt = (message.request_id, message.epoch)
        return [effect for nonce in self._of(attempt) for effect in self._drop(nonce, "released")]

    def tick(self, now: float) -> list[LeaseEffect]:
        """Time has passed."""
        over = [nonce for nonce, lease in self._leases.items() if lease.deadline is not None and lease.deadline <= now]
        return [effect for nonce in over for effect in self._drop(nonce, "expired")]

    def deadline(self) -> float | None:
        """When `tick` has something to do next, if nothing else happens."""
        return min((lease.deadline for lease in self._leases.values() if lease.deadline is not None), default=None)

    def closed(self) -> list[LeaseEffect]:
        """The gateway is gone, and with it all that could be told it."""
        return [effect for nonce in list(self._leases) for effect in self._drop(nonce, "closed")]

    def _of(self, attempt: tuple[str, int]) -> list[bytes]:
        named = ((nonce, lease.prefill.generate) for nonce, lease in self._leases.items())
        return [nonce for nonce, generate in named if (generate.request_id, generate.epoch) == attempt]

    def _keep(self, nonce: bytes, lease: Lease) -> list[LeaseEffect]:
        self._leases[nonce] = lease
        return [] if lease.end is None else self._drop(nonce, lease.end)

    def _drop(self, nonce: bytes, why: End) -> list[LeaseEffect]:
        del self._leases[nonce]
        return [Drop(nonce, why)]

    def _ticket(self, lease: Lease, chunk: Chunk) -> Ticket:
        prefill, source = lease.prefill, self._source
        return Ticket(
            nonce=prefill.nonce,
            request_id=prefill.generate.request_id,
            epoch=prefill.generate.epoch,
            prefill_boot=source.boot,
            decode_boot=prefill.decode_boot,
            fingerprint=source.fingerprint,
            tenant=prefill.generate.cache_salt,
            token_hash=token_hash(tokens_of(prefill.generate)[: chunk.stop]),
            address=source.address,
            chunk=lease.tickets,
            start=chunk.start,
            stop=chunk.stop,
            frames=chunk.frames,
            checksum=chunk.checksum,
            last=chunk.stop == lease.limit,
            expiry=prefill.expiry,
        )
