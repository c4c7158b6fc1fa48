"""One request's way through the workers, as the gateway sees it: who has it, what the client has been given, and what comes next.

A state machine without I/O (docs/handover.md). Each attempt, one decode worker and perhaps a prefill worker, has an epoch. Whatever
happens to an attempt, the client gets each token once and in order, and each choice ends once: with an output that has a finish
reason, or, all of them, with `Fail`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

import msgspec

from tokenmill.core.errors import EngineDied, TokenmillError
from tokenmill.core.handover import (
    WAITED_TOO_LONG,
    Prefill,
    Ready,
    Refused,
    Release,
    Reserve,
    Reserved,
    Start,
    Taken,
    full_positions,
    tokens_of,
)
from tokenmill.core.messages import Abort, Failed, Generate, SequenceOutput
from tokenmill.core.types import FinishReason


class Process(NamedTuple):
    """One start of a worker. name: the worker's, the same in all its starts. boot: random, of this start."""

    name: str
    boot: str


class NeedDecode(NamedTuple):
    """A worker is wanted that decodes, of none of these names. The answer is `decode_worker`. separate: another may compute the prompt."""

    excluding: frozenset[str]
    separate: bool


class NeedPrefill(NamedTuple):
    """A worker is wanted that computes a prompt for `decode`, of none of these names. The answer is `prefill_worker`. have: positions of
    the prompt that `decode` has already, so that it may not be worth it. source: a worker that has decoded until now, and so has all of it:
    the right one, if it is still there."""

    excluding: frozenset[str]
    decode: Process
    have: int
    source: Process | None = None


class Send(NamedTuple):
    """Tell a worker, if that process is still there."""

    to: Process
    message: Generate | Abort | Reserve | Prefill | Ready | Taken | Refused | Start | Release


class Deliver(NamedTuple):
    """Give this to the client."""

    output: SequenceOutput


class Fail(NamedTuple):
    """Tell the client that all choices which have not ended are lost."""

    error: TokenmillError


Effect: TypeAlias = NeedDecode | NeedPrefill | Send | Deliver | Fail


class CoursePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """prefills: workers that are tried for a prompt before the decode worker computes it all. losses: workers that a request may
    lose, by death or by hanging, before it is given up; it may be what kills them. progress: tokens after which earlier losses count no
    more, as it was not what killed those. reservation_expiry, lease_expiry: seconds, as in
    `Reserve` and `Prefill`."""

    prefills: int = 2
    losses: int = 3
    progress: int = 8
    reservation_expiry: float = 300.0
    lease_expiry: float = 30.0


class Stage(enum.Enum):
    """What an attempt waits for: CHOOSING: a decode worker's name. RESERVING: its frames. PAIRING: a prefill worker's name. PREFILLING:
    the prompt and its token. RUNNING: the decode worker's outputs. OVER: nothing more."""

    CHOOSING = "choosing"
    RESERVING = "reserving"
    PAIRING = "pairing"
    PREFILLING = "prefilling"
    RUNNING = "running"
    OVER = "over"


class Course:
    """One request from its acceptance to its end. Each event returns what is to be done, in this order; events that come too late return
    nothing, so that nobody need know how far it is."""

    def __init__(self, generate: Generate, *, separate: bool, policy: CoursePolicy | None = None) -> None:
        """separate: have the prompt computed by another worker, where there is one. Not with several choices."""
        assert not (separate and generate.params.n > 1), "several choices stay on one worker"
        assert not generate.output, "what has been put out is counted here"
        self._generate = generate
        self._policy = policy or CoursePolicy()
        self._separate = separate
        self._stage = Stage.CHOOSING
        self._epoch = generate.epoch
        self._decode: Process | None = None
        self._prefill: Process | None = None  # as long as it may hold something for this attempt
        self._source: Process | None = None  # that was left by the last `leave`
        self._nonce = b""
        self._have = 0
        self._last_chunk: int | None = None  # once the ticket that says so has been passed on
        self._settled = False  # whether the decode worker will copy no more
        self._open: dict[int, list[int]] = {choice: [] for choice in range(generate.params.n)}
        self._not_decode: frozenset[str] = frozenset()
        self._not_prefill: frozenset[str] = frozenset()
        self._prefills_failed = 0
        self._losses = 0
        self._since_loss = 0  # tokens
        self._why: TokenmillError | None = None  # what the last decode worker that refused said

    @property
    def over(self) -> bool:
        return self._stage is Stage.OVER

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def begun(self) -> list[int]:
        """Choices that have tokens, and not the last one."""
        return [choice for choice, tokens in self._open.items() if tokens]

    @property
    def decode(self) -> Process | None:
        """The decode worker of this attempt."""
        return self._decode

    @property
    def prefill(self) -> Process | None:
        """The prefill worker, as long as it may hold something for this attempt."""
        return self._prefill

    def begin(self) -> list[Effect]:
        """The request has been accepted."""
        return self._seek_decode()

    def decode_worker(self, answer: Process | TokenmillError) -> list[Effect]:
        """The answer to `NeedDecode`: a worker, or why there is none."""
        if self._stage is not Stage.CHOOSING:
            return []
        if isinstance(answer, TokenmillError):
            return self._fail(self._why or answer)
        return self._attempt(answer)

    def prefill_worker(self, answer: Process | None) -> list[Effect]:
        """The answer to `NeedPrefill`: a worker, or none."""
        if self._stage is not Stage.PAIRING:
            return []
        if answer is None:
            return self._start(())
        assert self._decode is not None
        self._stage, self._prefill = Stage.PREFILLING, answer
        prefill = Prefill(self._attempted(), self._nonce, self._decode.boot, self._have, self._policy.lease_expiry)
        return [Send(answer, prefill)]

    def heard(self, sender: Process, message: Reserved | Ready | Taken | Refused | SequenceOutput | Failed) -> list[Effect]:
        """A worker says something about this request."""
        epoch = message.ticket.epoch if isinstance(message, Ready) else message.epoch
        if self.over or epoch != self._epoch:
            return []
        match message:
            case SequenceOutput() if sender == self._speaker:
                return self._take(sender, message)
            case Reserved() if sender == self._decode and self._stage is Stage.RESERVING:
                return self._reserved(message)
            case Ready() if sender == self._prefill and self._stage is Stage.PREFILLING:
                return self._pass_on(message)
            case Taken() | Refused() if sender == self._decode and message.nonce == self._nonce:
                return self._pass_back(message)
            case Failed() if sender == self._decode:
                return self._decode_refused(message.error())
            case Failed() if sender == self._prefill and self._stage is Stage.PREFILLING:
                self._not_prefill |= {sender.name}
                return self._without_prefill()
        return []

    def lost(self, process: Process) -> list[Effect]:
        """A worker's process has ended."""
        if self.over:
            return []
        if process == self._decode:
            return self._decode_lost()
        if process != self._prefill:
            return []
        if self._stage is Stage.PREFILLING:
            return self._prefill_lost()
        self._prefill = None
        return []

    def hung(self, process: Process) -> list[Effect]:
        """A worker does not move, or is taken for one that does not. What it says from now on is not listened to."""
        if self.over:
            return []
        if process == self._decode:
            self._not_decode |= {process.name}
            return [self._release(process), *self._decode_lost()]
        if process == self._prefill and self._stage is Stage.PREFILLING:
            self._not_prefill |= {process.name}
            return [self._release(process), *self._prefill_lost()]
        return []

    def leave(self, process: Process, *, gives: bool) -> list[Effect]:
        """A worker that decodes is to be left, though it is well, for another one that goes on. gives: the frames that it has, to that
        one. Nothing if it does not decode here."""
        if self.over or process != self._decode:
            return []
        alone = self._generate.params.n == 1
        self._source = process if gives and alone and self._stage is Stage.RUNNING else None
        effects = self._releases()
        self._stage = Stage.CHOOSING
        return [*effects, NeedDecode(self._not_decode | {process.name}, self._separates or self._source is not None)]

    def abort(self, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> list[Effect]:
        """The client wants no more of a choice, or of all. What has ended already is let pass."""
        ending = [known for known in self._open if choice in (None, known)]
        effects: list[Effect] = [self._last_output(known, reason) for known in ending]
        for known in ending:
            del self._open[known]
        if not ending:
            return []
        if not self._open:
            return effects + self._end()
        if self._stage is Stage.RUNNING:
            assert self._decode is not None
            effects += [Send(self._decode, Abort(self._generate.request_id, known, reason)) for known in ending]
        return effects

    @property
    def _speaker(self) -> Process | None:
        """Whose tokens are listened to."""
        return {Stage.PREFILLING: self._prefill, Stage.RUNNING: self._decode}.get(self._stage)

    def _seek_decode(self) -> list[Effect]:
        self._stage, self._decode, self._prefill = Stage.CHOOSING, None, None
        return [NeedDecode(self._not_decode, self._separates)]

    @property
    def _separates(self) -> bool:
        return self._separate and self._prefills_failed < self._policy.prefills

    def _attempted(self) -> Generate:
        """The request as it is now to be gone on with."""
        fresh = len(self._open) == self._generate.params.n and not any(self._open.values())
        output = {} if fresh else {choice: list(tokens) for choice, tokens in self._open.items()}
        return msgspec.structs.replace(self._generate, epoch=self._epoch, output=output)

    def _attempt(self, decode: Process) -> list[Effect]:
        self._epoch += 1
        self._decode, self._prefill = decode, None
        self._last_chunk, self._settled = None, False
        if self._separates or self._source is not None:
            self._stage = Stage.RESERVING
            return [Send(decode, Reserve(self._attempted(), self._policy.reservation_expiry))]
        self._stage = Stage.RUNNING
        return [Send(decode, self._attempted())]

    def _reserved(self, message: Reserved) -> list[Effect]:
        assert self._decode is not None
        self._nonce, self._have = message.nonce, message.have
        if message.have >= full_positions(len(tokens_of(self._attempted()))):
            return self._start(())
        self._stage = Stage.PAIRING
        source, self._source = self._source, None
        return [NeedPrefill(self._not_prefill | {self._decode.name}, self._decode, message.have, source)]

    def _start(self, tokens: tuple[int, ...]) -> list[Effect]:
        assert self._decode is not None
        self._stage = Stage.RUNNING
        return [Send(self._decode, Start(self._generate.request_id, self._epoch, tokens))]

    def _pass_on(self, message: Ready) -> list[Effect]:
        assert self._decode is not None
        assert self._prefill is not None
        ticket = message.ticket
        if (ticket.nonce, ticket.prefill_boot, ticket.decode_boot) != (self._nonce, self._prefill.boot, self._decode.boot):
            return []
        if ticket.last:
            self._last_chunk = ticket.chunk
        return [Send(self._decode, message)]

    def _pass_back(self, message: Taken | Refused) -> list[Effect]:
        if self._prefill is None:
            return []
        effect = Send(self._prefill, message)
        self._settled |= isinstance(message, Refused) or message.chunk == self._last_chunk
        self._forget_settled()
        return [effect]

    def _forget_settled(self) -> None:
        """A prefill worker whose token is here and whose frames are no longer needed ends its lease itself."""
        if self._settled and self._stage is Stage.RUNNING:
            self._prefill = None

    def _take(self, sender: Process, output: SequenceOutput) -> list[Effect]:
        given = self._open.get(output.choice)
        if given is None:
            return []
        if output.index != len(given):
            known = output.index + len(output.tokens) <= len(given)
            return [] if known else self.hung(sender)  # with a gap, so that only another attempt can give what is missing
        given += output.tokens
        self._since_loss += len(output.tokens)
        effects: list[Effect] = [Deliver(output)]
        if output.finish_reason is not None:
            del self._open[output.choice]
            return effects if self._open else effects + self._end(finished=sender)
        if self._stage is Stage.PREFILLING:
            effects += self._start(tuple(output.tokens))
            self._forget_settled()
        return effects

    def _decode_refused(self, error: TokenmillError) -> list[Effect]:
        assert self._decode is not None
        name, self._decode = self._decode.name, None
        if error.status < 500:
            return self._fail(error)
        effects = self._releases()
        if error.code == WAITED_TOO_LONG:
            self._prefills_failed += 1
        else:
            self._why = error
            self._not_decode |= {name}
        return effects + self._seek_decode()

    def _decode_lost(self) -> list[Effect]:
        self._decode = None
        effects = self._releases()
        return effects + (self._give_up() or self._seek_decode())

    def _prefill_lost(self) -> list[Effect]:
        self._prefill = None
        return self._give_up() or self._without_prefill()

    def _without_prefill(self) -> list[Effect]:
        """There is no token from the prefill worker. With all its chunks on the way, and after several that failed, the decode worker
        goes on alone; else another one is tried, in an attempt of its own so that no ticket of the first can be meant."""
        assert self._decode is not None
        self._prefill = None
        self._prefills_failed += 1
        if self._last_chunk is not None or not self._separates:
            return self._start(())
        return [self._release(self._decode), *self._attempt(self._decode)]

    def _give_up(self) -> list[Effect]:
        """Count a loss; what ends the course if it is one too many."""
        self._losses = 1 if self._since_loss >= self._policy.progress else self._losses + 1
        self._since_loss = 0
        if self._losses <= self._policy.losses:
            return []
        message = f"{self._losses} workers ended while they had this request: it is not tried again, as it may be the cause"
        return self._fail(EngineDied(message))

    def _last_output(self, choice: int, reason: FinishReason) -> Deliver:
        index = len(self._open[choice])
        output = SequenceOutput(self._generate.request_id, choice, [], finish_reason=reason, epoch=self._epoch, index=index)
        return Deliver(output)

    def _fail(self, error: TokenmillError) -> list[Effect]:
        self._open.clear()
        return [*self._end(), Fail(error)]

    def _end(self, finished: Process | None = None) -> list[Effect]:
        """finished: the worker whose own sequence has just ended."""
        self._stage = Stage.OVER
        if finished == self._decode:
            self._decode = None
        return self._releases()

    def _releases(self) -> list[Effect]:
        """End what workers have of the attempt."""
        processes, self._decode, self._prefill = (self._decode, self._prefill), None, None
        return [self._release(process) for process in processes if process is not None]

    def _release(self, process: Process) -> Send:
        return Send(process, Release(self._generate.request_id, self._epoch))
