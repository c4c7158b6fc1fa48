"""The queues, and the effects of a plan on the KV manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import replace
from types import MappingProxyType

from tokenmill.core.errors import KVBudgetTooSmall
from tokenmill.core.kv_spelling import at_least
from tokenmill.kv.manager import KVManager
from tokenmill.kv.prefix_tree import MISS
from tokenmill.scheduler.pace import Pace
from tokenmill.scheduler.plan import Limits, Reservation, Work, plan
from tokenmill.scheduler.queues import SequenceQueue
from tokenmill.scheduler.sequence import Sequence, Weights

Step = list[Work]


class Scheduler:
    """Owns every sequence from `add` until `finish` or `abort`.

    A step is `schedule` (plan it and move frames), the model's work on it, and `commit`. Since the start: n_preemptions;
    prefix_queries, prefix_hits: prompt tokens looked up, and found, in the prefix cache at first admissions; n_sparsified: points of
    budgets at which frames were given up; n_tainted: how often a sequence came to its first one; n_refused: requests whose prompt
    exceeds their budget.
    """

    def __init__(
        self, kv: KVManager, limits: Limits, give_way: Callable[[bool], bool] = lambda leases: False, pace: Pace | None = None
    ) -> None:
        """give_way: frees frames that are held for others than its sequences, those that others come for (leases) only if it is told so;
        says whether there were any. pace: bounds steps in which sequences decode, if they are to be bounded."""
        self.kv = kv
        self.limits = limits
        self._give_way = give_way
        self._pace = pace
        self.n_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.n_sparsified = 0
        self.n_tainted = 0
        self.n_refused = 0
        self._waiting = SequenceQueue()
        self._running = SequenceQueue()
        self._requests: dict[str, dict[int, Sequence]] = {}
        self._lent: dict[Sequence, int] = {}
        """Sequences that got frames for a draft, and the positions that they had frames for before."""

    @property
    def request_ids(self) -> list[str]:
        """Of all that are not over."""
        return list(self._requests)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def spare(self) -> int:
        """Frames that an admission leaves for those who run: one for each of them and each KV group."""
        return self.n_running * self.kv.n_groups

    def waiting(self) -> Iterable[Sequence]:
        """In order of service; not to be kept."""
        return self._waiting

    def decoding(self) -> list[Sequence]:
        """Running sequences that have only their newest token to compute, in order of service."""
        return [sequence for sequence in self._running if sequence.target - sequence.computed == 1]

    def serves(self, request_id: str) -> bool:
        """Whether a sequence of that request is queued."""
        return request_id in self._requests

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises `KVBudgetTooSmall` when it could not run even alone.
        """
        choices = self._requests.get(sequence.request_id, {})
        assert sequence.choice not in choices, f"{sequence.id} is already here"
        max_tokens = sequence.params.max_tokens
        assert max_tokens is not None, "max_tokens is resolved before a sequence is scheduled"
        if sequence.kv_budget is not None:
            sequence.ladder = self.kv.ladder(sequence.kv_budget)
        self._check_fit(sequence, max_tokens)
        self._requests[sequence.request_id] = choices
        choices[sequence.choice] = sequence
        self._waiting.push(sequence)

    def abort(self, request_id: str, choice: int | None = None) -> list[Sequence]:
        """Drop one choice of a request, or all, with their frames; returns the sequences dropped (none if it is over)."""
        choices = self._requests.get(request_id, {})
        gone = [s for s in choices.values() if choice is None or s.choice == choice]
        for sequence in gone:
            self.finish(sequence)
        return gone

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that is over. Its full frames stay cached."""
        if sequence.running:
            self._stop(sequence)
        else:
            self._waiting.remove(sequence)
        choices = self._requests[sequence.request_id]
        del choices[sequence.choice]
        if not choices:
            del self._requests[sequence.request_id]

    def lend(self, sequence: Sequence, wanted: int) -> int:
        """Frames for a draft of `wanted` tokens of a sequence that is `decoding`, if nobody else may need them; returns for how many
        tokens there are. They go back when the step is committed, unless a token has come to need them."""
        target, covered = sequence.target, self.kv.covered(sequence.id)
        end = target + min(wanted, sequence.draft_room)
        if end > covered:
            rest = self.spare
            if self.n_waiting:
                first = next(iter(self._waiting))
                rest += self.kv.fresh(MISS, first.goal, self.limits.chunk, first.ladder)
            if self.kv.missing(sequence.id, end, end) > self.kv.available - rest:
                end = covered
            else:
                self.kv.reserve(sequence.id, end, end, self.kv.n_frames if sequence.ladder is not None else rest)
                self._lent.setdefault(sequence, covered)
        return max(0, end - target)

    def schedule(self, now: float) -> Step | None:
        """Plan the next step at time `now` and give each sequence in it its frames. None when there is nothing to do, or nobody runs
        and what waits finds no room beside frames that others come for."""
        if not self.has_work:
            return None
        limits = self.limits if self._pace is None else replace(self.limits, max_rows=self._pace.rows)
        decision = plan(self._waiting, self._running, limits, self.kv)
        if decision.preempt and self._lent:
            self._take_back()
            decision = plan(self._waiting, self._running, limits, self.kv)
        while (decision.preempt or decision.short) and self._give_way(True):
            decision = plan(self._waiting, self._running, limits, self.kv)
        while not decision.work and self._give_way(False):
            decision = plan(self._waiting, self._running, limits, self.kv)
        for sequence in decision.preempt:
            self._stop(sequence)
            sequence.restart()
            self._waiting.push(sequence)
            self.n_preemptions += 1
        for sequence in decision.admit:
            self._start(sequence, now)
        self._reserve(decision.reserve)
        assert decision.work or self.kv.n_holders > self.n_running, "sequences are queued, but none can run"
        return decision.work or None

    def commit(
        self, step: Step, sampled: Mapping[Sequence, Ordered[int]], weights: Mapping[Sequence, Weights] = MappingProxyType({})
    ) -> None:
        """The step is computed. sampled: the new tokens of each sequence whose work says `samples`: tokens of its draft that are
        right, and one more. weights: of each whose work says `weighs`, the attention that its rows of this step gave to each frame
        of positions, in groups that keep everything.

        Sequences that ended since `schedule` are passed over. One that is `over_budget` now is to be finished.
        """
        for sequence, start, n_tokens, samples, _, weighs, _ in step:
            if not sequence.running:
                continue
            sequence.draft = ()
            covered = self._lent.pop(sequence, None)
            assert sequence.computed == start, f"{sequence.id} has {sequence.computed} computed tokens, its work starts at {start}"
            new = sampled[sequence] if samples else ()
            sequence.token_ids.extend(new)
            sequence.computed = start + n_tokens + max(0, len(new) - 1)
            self.kv.commit(sequence.id, sequence.token_ids, sequence.computed)
            if sequence.ladder is not None:
                if weighs:
                    sequence.weigh(weights[sequence])
                self._climb(sequence, len(new))
            if covered is not None and sequence.target <= covered:
                self.kv.truncate(sequence.id, covered)

    def learn(self, step: Step, seconds: float) -> None:
        """The step took `seconds`."""
        if self._pace is not None:
            self._pace.learn(step, seconds)

    def check_integrity(self, others: int = 0) -> None:
        """Compare queues, index and KV tables, and check the KV manager; raises AssertionError. others: tables that belong to none of
        its sequences."""
        self.kv.check_integrity()
        queued = {s.id: s for s in (*self._running, *self._waiting)}
        indexed = {s.id: s for choices in self._requests.values() for s in choices.values()}
        assert queued == indexed, "queues and index differ"
        assert len(queued) == self.n_running + self.n_waiting, "a sequence is queued twice"
        for queue in (self._running, self._waiting):
            order = [s.rank for s in queue]
            assert order == sorted(order), "a queue is out of order"
        assert all(s.running for s in self._running), "a running sequence is not marked so"
        assert not any(s.running or s.computed or s.climbed for s in self._waiting), "a waiting sequence has a place or computed tokens"
        assert all(s.computed <= self.kv.covered(s.id) for s in self._running), "computed positions have no frames"
        assert self.kv.n_holders == len(self._running) + others, "a table belongs to no running sequence"

    def _start(self, sequence: Sequence, now: float) -> None:
        self._waiting.remove(sequence)
        self._running.push(sequence)
        sequence.running = True
        sequence.computed = self.kv.acquire(sequence.id, sequence.token_ids, sequence.cache_salt, sequence.reuse_limit)
        self.kv.promise(sequence.id, sequence.goal, self.limits.chunk, sequence.ladder)
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
            sequence.reused = sequence.computed
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_len)
            self.prefix_queries += sequence.prompt_len
            self.prefix_hits += sequence.cached_tokens

    def _stop(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._lent.pop(sequence, None)
        sequence.running = False
        self.kv.release(sequence.id)

    def _take_back(self) -> None:
        """Nobody is preempted for a draft."""
        for sequence, covered in self._lent.items():
            sequence.draft = ()
            self.kv.truncate(sequence.id, covered)
        self._lent.clear()

    def _reserve(self, wishes: list[Reservation]) -> None:
        """A sequence with a budget takes no larger pages than it needs; others leave a frame per running sequence and group."""
        later, rest = sum(wish.need for wish in wishes), self.spare
        for sequence, n_tokens, step, need in wishes:
            later -= need
            keep = self.kv.n_frames if sequence.ladder is not None else later + rest
            done = self.kv.reserve(sequence.id, n_tokens, step, keep)
            assert done, f"the plan promised {need} frames to {sequence.id}, but {self.kv.available} are available"

    def _climb(self, sequence: Sequence, n_new: int) -> None:
        """Give up frames at a point of the budget. n_new: tokens that the step gave; if there are several, only the last leads to one."""
        rung = sequence.rung
        if rung is not None and sequence.computed == rung.point:
            self.kv.sparsify(sequence.id, rung, () if sequence.weights is None else sequence.weights.tolist())
            self.n_sparsified += 1
            sequence.climbed += 1
            sequence.weights = None
            if sequence.sparsified_from is None:
                sequence.sparsified_from = rung.point
                self.n_tainted += 1
        if sequence.sparsified_from is not None:
            ends, first = range(sequence.computed - n_new + 1, sequence.computed + 1), sequence.sparsified_from
            sequence.dropped_tokens = [self.kv.dropped(sequence.id, end) if end >= first else 0 for end in ends]

    def _check_fit(self, sequence: Sequence, max_tokens: int) -> None:
        """Refuse what could not run even alone."""
        ladder, prompt_len = sequence.ladder, sequence.prompt_len
        if ladder is not None and not ladder.fits(prompt_len):
            self.n_refused += 1
            budget, asked = ladder.budget, sequence.params.kv_budget_mb
            more = ladder.enough(prompt_len) / budget
            least = f"per_request_budget_gb {at_least(more, 2)}-fold" if asked is None else f"kv_budget_mb to {at_least(more * asked)}"
            raise KVBudgetTooSmall(
                f"prompt has {prompt_len} tokens, whose keys and values take {ladder.peak(prompt_len)} KV frames, but "
                f"the request's KV budget{'' if asked is None else f' of {asked:g} MB'} is {budget}: shorten the prompt or raise {least}",
                param="kv_budget_mb",
            )
        most = prompt_len + max_tokens
        need, total = self.kv.fresh(MISS, most, self.limits.chunk, ladder), self.kv.n_frames
        if need > total:
            raise KVBudgetTooSmall(
                f"prompt has {prompt_len} tokens and max_tokens is {max_tokens}, which together take {need} KV frames, but the KV pool has "
                f"{total}: shorten the prompt, lower max_tokens or raise memory_budget_gb",
                param="max_tokens",
            )
