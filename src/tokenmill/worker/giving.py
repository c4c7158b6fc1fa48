"""Prompts that are computed here and decoded elsewhere: carries out what the leases (handover/lease.py) want done."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenmill.core.clock import Clock
from tokenmill.core.errors import TokenmillError, Unavailable
from tokenmill.core.handover import FromWorker, Prefill, Refused, Release, Taken, full_positions, tokens_of
from tokenmill.core.messages import SequenceOutput
from tokenmill.core.types import FinishReason
from tokenmill.worker.handover.effects import Compute, Drop, End, LeaseEffect, Send
from tokenmill.worker.handover.lease import Chunk, Leases, Source

if TYPE_CHECKING:
    from tokenmill.engine.engine import Engine, Leased
    from tokenmill.transfer.connector import Door


@dataclass(slots=True, eq=False)
class _Prompt:
    """One lease's part in the engine. computing: the engine is at it. keys: under which the engine keeps its frames."""

    prefill: Prefill
    computing: bool = True
    keys: list[Hashable] = field(default_factory=list)

    @property
    def attempt(self) -> tuple[str, int]:
        return self.prefill.generate.request_id, self.prefill.generate.epoch


class Giving:
    """The leases of one worker, its engine's frames for them, and the door by which others read those. send: to the gateway.
    ended: leases, by why."""

    def __init__(self, engine: Engine, door: Door, source: Source, send: Callable[[FromWorker], None], clock: Clock) -> None:
        self._engine = engine
        self._door = door
        self._send = send
        self._clock = clock
        self._leases = Leases(source)
        self._prompts: dict[bytes, _Prompt] = {}
        self._computing: dict[tuple[str, int], bytes] = {}
        self._nonces: dict[Hashable, bytes] = {}  # by the engine's keys
        self.ended: Counter[End] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    def prefill(self, message: Prefill) -> None:
        self._do(self._leases.prefill(message))

    def taken(self, message: Taken) -> None:
        self._do(self._leases.taken(message, self._clock.now()))

    def refused(self, message: Refused) -> None:
        self._do(self._leases.refused(message))

    def release(self, message: Release) -> bool:
        """False: there is no lease of this attempt."""
        effects = self._leases.release(message)
        self._do(effects)
        return bool(effects)

    def closed(self) -> None:
        """The gateway is gone."""
        self._do(self._leases.closed())

    def stepped(self, outputs: Sequence[SequenceOutput]) -> None:
        """A step is finished, and its outputs are about to be sent: tickets go before the token."""
        for leased in self._engine.take_leases():
            self._hand_out(leased)
        for output in outputs:
            nonce = self._computing.get((output.request_id, output.epoch))
            if nonce is not None and output.tokens:
                self._computed(nonce)

    def lost(self, key: Hashable) -> None:
        """The engine has taken frames back, if they were some of these: who asks for them now is refused."""
        nonce = self._nonces.get(key)
        if nonce is not None:
            self._door.revoke(nonce)

    def tick(self) -> None:
        self._do(self._leases.tick(self._clock.now()))

    def deadline(self) -> float | None:
        return self._leases.deadline()

    def _hand_out(self, leased: Leased) -> None:
        """A ticket for frames that have just been computed, if anybody still wants them."""
        nonce = self._computing.get((leased.request_id, leased.epoch))
        wanted = None if nonce is None else self._leases.next_chunk(nonce, leased.place.stop)
        if nonce is None or wanted is None:
            self._engine.transit.release(leased.key)
            return
        start, stop, of_groups = leased.place
        assert wanted == (start, stop), f"positions [{start}, {stop}) were leased, but {wanted} are next"
        prompt = self._prompts[nonce]
        prompt.keys.append(leased.key)
        self._nonces[leased.key] = nonce
        frames = tuple(tuple(frame for frame in of_group if frame >= 0) for of_group in of_groups)
        numbers = [array("i", of_group) for of_group in frames]
        checksum = self._engine.memory.frames(numbers).digest()
        self._door.grant(nonce, numbers)
        self._do(self._leases.chunk_computed(nonce, Chunk(start, stop, frames, checksum)))

    def _computed(self, nonce: bytes) -> None:
        prompt = self._prompts[nonce]
        self._stop_computing(prompt)
        missing = self._leases.next_chunk(nonce, len(tokens_of(prompt.prefill.generate)))
        if missing is None:
            self._do(self._leases.prompt_computed(nonce, self._clock.now()))
        else:  # the engine does not let others find them
            error = Unavailable(f"frames of positions {missing} are not to be handed over: the prompt is computed elsewhere")
            self._do(self._leases.failed(nonce, error))

    def _stop_computing(self, prompt: _Prompt) -> None:
        prompt.computing = False
        del self._computing[prompt.attempt]

    def _do(self, effects: Sequence[LeaseEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self._send(message)
                case Compute(prefill):
                    self._compute(prefill)
                case Drop(nonce, why):
                    self.ended[why] += 1
                    self._drop(nonce)

    def _compute(self, prefill: Prefill) -> None:
        generate = prefill.generate
        start = min(prefill.start, full_positions(len(tokens_of(generate))))
        try:
            self._engine.add(generate, lease_from=start)
        except TokenmillError as error:
            self._do(self._leases.rejected(prefill.nonce, error))
            return
        prompt = self._prompts[prefill.nonce] = _Prompt(prefill)
        self._computing[prompt.attempt] = prefill.nonce

    def _drop(self, nonce: bytes) -> None:
        prompt = self._prompts.pop(nonce)
        self._door.revoke(nonce)
        if prompt.computing:
            self._stop_computing(prompt)
            self._engine.abort(prompt.prefill.generate.request_id, None, FinishReason.ABORT)
        for key in prompt.keys:
            del self._nonces[key]
            self._engine.transit.release(key)
