"""How much each worker has to do, as far as the gateway knows: counted as it gives and takes, never asked for.

Counts change by O(1) with each part of a request that is given, moves on or ends, so that a decision always sees the work that was given an
instant ago; what workers report arrives seconds later. A report only adds what it shows beyond the gateway's own count: work that somebody
else has given.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from tokenmill.cluster.registry import Worker
from tokenmill.core.roles import Role

Key: TypeAlias = Hashable
"""Names a part of a request: whatever the caller tells parts apart by, such as (request, epoch)."""


@dataclass(slots=True, eq=False)
class Part:
    """What one worker does for one request. choices: sequences. uncomputed: prompt tokens still to be computed. kv_tokens: positions
    that it takes in the KV pool, or will. started: it need not wait for frames from elsewhere."""

    load: Load
    role: Role
    choices: int
    uncomputed: int
    kv_tokens: int
    started: bool

    @property
    def active(self) -> bool:
        """Whether a step of the worker could do something for it. A prompt that was computed for another worker is only kept."""
        return self.uncomputed > 0 if self.role is Role.PREFILL else self.started


@dataclass(slots=True, eq=False)
class Load:
    """One worker's work; only `Loads` changes it.

    sequences: that are there, in any state. streams: those of them that decode there, or will. active: those that a step could do something
    for. queued_prompt_tokens: still to be computed. kv_tokens: positions that they take in the KV pool, or will. The foreign ones are what
    others have given, and are part of `sequences`, `streams` and `kv_tokens`.
    """

    worker: Worker
    sequences: int = 0
    streams: int = 0
    active: int = 0
    queued_prompt_tokens: int = 0
    kv_tokens: int = 0
    foreign_sequences: int = 0
    foreign_kv_tokens: int = 0
    parts: dict[Key, Part] = field(default_factory=dict)

    @property
    def step_rows(self) -> int:
        """The most rows that a step can have now; 0: there is nothing to do."""
        return min(self.queued_prompt_tokens, self.worker.chunk_size) + self.active

    def lacks_room(self, tokens: int) -> bool:
        """Whether one more sequence, with so many positions that are not there yet, would wait or displace another."""
        return self.sequences >= self.worker.max_batch_size or self.kv_tokens + tokens > self.worker.kv_tokens


class Loads:
    """The work of all workers. A key that is not known is one whose worker has left: news of it is too late and changes nothing."""

    def __init__(self) -> None:
        self.by_worker: dict[str, Load] = {}
        """To be read only."""
        self._parts: dict[Key, Part] = {}

    def join(self, worker: Worker) -> list[Key]:
        """Begin to count for a process that has nothing yet. Returns the parts that were on an earlier one of the same id."""
        lost = self.leave(worker.id)
        self.by_worker[worker.id] = Load(worker)
        return lost

    def leave(self, worker_id: str) -> list[Key]:
        """Forget a worker. Returns the parts that were there, which are to be done elsewhere."""
        load = self.by_worker.pop(worker_id, None)
        if load is None:
            return []
        for key in load.parts:
            del self._parts[key]
        return list(load.parts)

    def where(self, key: Key) -> str | None:
        """The id of the worker that has this part."""
        part = self._parts.get(key)
        return None if part is None else part.load.worker.id

    def give(self, key: Key, worker_id: str, role: Role, *, prompt_tokens: int, cached_tokens: int = 0, choices: int = 1) -> None:
        """A part of a request goes to a worker, which must be there. cached_tokens: how much of the prompt it probably has, in frames
        that other sequences keep as well. A decode part waits for its frames until `start`, or until `remaining` says that it computes."""
        assert key not in self._parts, f"{key} was given already"
        assert 0 <= cached_tokens <= prompt_tokens, f"{cached_tokens} of {prompt_tokens} tokens cached"
        assert choices >= 1, f"{choices} choices"
        load = self.by_worker[worker_id]
        missing = prompt_tokens - cached_tokens
        waits = role is Role.DECODE
        part = Part(load, role, choices, 0 if waits else missing, missing, started=not waits)
        self._parts[key] = load.parts[key] = part
        load.sequences += choices
        load.streams += 0 if role is Role.PREFILL else choices
        load.active += choices if part.active else 0
        load.queued_prompt_tokens += part.uncomputed
        load.kv_tokens += part.kv_tokens

    def start(self, key: Key) -> None:
        """The part need not wait any longer."""
        part = self._parts.get(key)
        if part is not None:
            self._move(part, part.uncomputed, started=True)

    def remaining(self, key: Key, tokens: int) -> None:
        """So many of the part's prompt tokens are still to be computed there."""
        part = self._parts.get(key)
        if part is not None:
            self._move(part, tokens, started=True)

    def output(self, key: Key, tokens: int = 1) -> None:
        """The part has put out tokens, so that nothing of its prompt remains."""
        part = self._parts.get(key)
        if part is not None:
            self._move(part, 0, started=True)
            part.kv_tokens += tokens
            part.load.kv_tokens += tokens

    def end(self, key: Key) -> bool:
        """The part is over, and nothing of it is kept. False: it was not known."""
        part = self._parts.pop(key, None)
        if part is None:
            return False
        load = part.load
        del load.parts[key]
        load.sequences -= part.choices
        load.streams -= 0 if part.role is Role.PREFILL else part.choices
        load.active -= part.choices if part.active else 0
        load.queued_prompt_tokens -= part.uncomputed
        load.kv_tokens -= part.kv_tokens
        return True

    def report(self, worker_id: str, *, sequences: int, kv_tokens: int) -> None:
        """What a worker says that it has: sequences, running or waiting, and positions held in its KV pool."""
        load = self.by_worker.get(worker_id)
        if load is None:
            return
        foreign = max(0, sequences - (load.sequences - load.foreign_sequences))
        load.sequences += foreign - load.foreign_sequences
        load.streams += foreign - load.foreign_sequences
        load.foreign_sequences = foreign
        foreign = max(0, kv_tokens - (load.kv_tokens - load.foreign_kv_tokens))
        load.kv_tokens += foreign - load.foreign_kv_tokens
        load.foreign_kv_tokens = foreign

    def __len__(self) -> int:
        """Parts of requests that are alive."""
        return len(self._parts)

    def _move(self, part: Part, uncomputed: int, *, started: bool) -> None:
        load, was_active = part.load, part.active
        load.queued_prompt_tokens += uncomputed - part.uncomputed
        part.uncomputed, part.started = uncomputed, started
        load.active += part.choices * (part.active - was_active)
