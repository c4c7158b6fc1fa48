"""What the state machines want done. Effects are carried out in the order in which they are returned."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from tokenmill.core.handover import Prefill, Ready, Refusal, Refused, Reserve, Reserved, Taken, Ticket
from tokenmill.core.messages import Failed

End: TypeAlias = Literal["taken", "refused", "released", "expired", "closed", "failed"]
"""Why frames are kept no longer: taken: all have been copied. refused: no more will be. released: the gateway says so. expired: nobody
asked for them in time. closed: the gateway is gone. failed: the engine could not go on."""


class Send(NamedTuple):
    """Tell the gateway."""

    message: Reserved | Ready | Taken | Refused | Failed


class Compute(NamedTuple):
    """Have the engine compute a prompt and draw one token; its frames stay until `Drop`. If it does not take it, that is `rejected`."""

    prefill: Prefill


class Open(NamedTuple):
    """Have the engine take frames for a sequence and let it wait. The answer is `opened` or `rejected`."""

    reserve: Reserve
    nonce: bytes


class Read(NamedTuple):
    """Have the connector copy what the ticket names into the reservation's frames of the same positions. The answer is `read_ended`,
    always: until then the frames are the connector's."""

    nonce: bytes
    ticket: Ticket


class StopReading(NamedTuple):
    """A read is no longer of use; its `read_ended` should come soon."""

    nonce: bytes


class Run(NamedTuple):
    """Let a waiting sequence run; its frames are the engine's from now on. computed: positions whose frames are right, at most all
    tokens but one. tokens: to put behind the sequence's own, without telling them."""

    nonce: bytes
    request_id: str
    epoch: int
    computed: int
    tokens: tuple[int, ...]


class Drop(NamedTuple):
    """End a lease or a reservation: abort what is computed for it, let nobody read its frames any more, and free them.

    right: positions of a reservation whose frames hold what they should, so that the prefix tree may have them; 0 of a lease, of whose
    frames the engine itself knows.
    """

    nonce: bytes
    why: End
    right: int = 0


class Refuse(NamedTuple):
    """A chunk was not taken, to be counted."""

    reason: Refusal


LeaseEffect: TypeAlias = Send | Compute | Drop
ReservationEffect: TypeAlias = Send | Open | Read | StopReading | Run | Drop | Refuse
