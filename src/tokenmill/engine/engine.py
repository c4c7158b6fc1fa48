"""The engine of one model: requests in, a step at a time, outputs out."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from tokenmill.core.clock import Clock
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.limits import room_after
from tokenmill.core.messages import EngineInfo, Generate, SequenceOutput, Stats
from tokenmill.core.types import FRAME, FinishReason
from tokenmill.engine.cache import RequestBudget
from tokenmill.engine.filling import Filling
from tokenmill.engine.generation import Generation
from tokenmill.engine.runner import Flight, Runner, StepResult
from tokenmill.engine.transit import Place, Transit
from tokenmill.kernels.frames import KVMemory
from tokenmill.kv.groups import Window
from tokenmill.sampling.sampler import NO_TOKEN
from tokenmill.sampling.state import SamplerState
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.sequence import Sequence
from tokenmill.speculate.speculator import Speculator

GROWTH = 8
"""Frames of each KV group that a reservation leaves for each running sequence, so that it need not give way to these soon."""


class Leased(NamedTuple):
    """Frames that are kept for who goes on with a request, until `Transit.release(key)`."""

    key: Hashable
    request_id: str
    epoch: int
    place: Place


class Engine:
    """Not thread-safe: one caller adds, aborts and steps. An idle engine holds no frame for any sequence.

    From the first step to the last one a step is in flight whenever `step` has returned: it is executed while the caller
    delivers what came out of the one before. Sequences may be added and aborted meanwhile. The frames of an aborted one are free
    at once: the step in flight may still write to them, but frames are handed out only when the next one is planned.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        budget: RequestBudget,
        transit: Transit,
        speculator: Speculator | None = None,
        filling: Filling | None = None,
        check_when_idle: bool = False,
    ) -> None:
        """budget: what the KV of a request may take. transit: frames that are held for others. speculator: who drafts, if anybody does.
        filling: is told of steps, for who keeps what they fill. check_when_idle: find the owner of every frame from scratch whenever the
        last sequence has ended."""
        self.info = info
        self.transit = transit
        self.filling = filling
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._budget = budget
        self.speculator = speculator
        self._check_when_idle = check_when_idle
        self._generations: dict[Sequence, Generation] = {}
        self._flight: Flight | None = None
        self._started = 0.0  # when the step in flight was
        self._outputs: list[SequenceOutput] = []  # of finished steps and ended sequences, still to be told
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._over_budget = 0
        self._steps = 0
        self._leased: dict[Sequence, int] = {}
        """Sequences that others go on with, and the positions up to which they have been leased."""
        self._leases: list[Leased] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return self._scheduler.has_work or self._flight is not None or bool(self._outputs)

    @property
    def in_step(self) -> bool:
        """Whether `finish_step` has something to finish or to tell. If not, though there is work, it waits for frames in transit."""
        return self._flight is not None or bool(self._outputs)

    @property
    def memory(self) -> KVMemory:
        """The KV pool's bytes."""
        return self._runner.memory

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each KV group, in positions; None where all are kept."""
        rules = (group.retention for group in self._scheduler.kv.groups)
        return tuple(rule.tokens if isinstance(rule, Window) else None for rule in rules)

    def add(self, request: Generate, lease_from: int | None = None) -> None:
        """Accept a request: a sequence for each of its choices. lease_from: others go on with them after their first token, which
        comes without a reason to finish, and are leased the frames of their prompts from that position on, as they are computed
        (`take_leases`).

        Raises `InvalidRequest` for what can never be served (bad token ids, too long for the context or the KV pool, an id in
        use); then nothing of it stays behind.
        """
        self._check(request)
        params, arrival = request.params, self._clock.now()
        kv_budget = self._budget.frames(params.kv_budget_mb)
        # A damaged file may name end tokens for which its model has no logit.
        eos = () if params.ignore_eos else (token for token in request.eos_ids if 0 <= token < self.info.vocab_size)
        ends = frozenset(params.stop_token_ids).union(eos)
        for choice, output in request.choices.items():
            own = msgspec.structs.replace(params, prompt_logprobs=None) if output else params  # which came before the first token
            sequence = Sequence(
                request_id=request.request_id,
                choice=choice,
                token_ids=request.prompt + output,
                prompt_len=len(request.prompt),
                params=own,
                seed=params.seed or 0,
                priority=request.priority,
                arrival=arrival,
                cache_salt=request.cache_salt,
                reuse=own.prompt_logprobs is None,
                kv_budget=kv_budget,
                hands_over=lease_from is not None,
            )
            self._scheduler.add(sequence)
            if lease_from is not None:
                self._leased[sequence] = lease_from
            state = SamplerState(own, choice, request.prompt, ends)
            for token in output:
                state.observe(token)
            self._generations[sequence] = Generation(state, ends, request.epoch)
        self._prompt_tokens += len(request.prompt)

    def abort(self, request_id: str, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, or one choice of it, now: its last output comes with the next step, and what a step in flight computes
        of it is dropped. What is unknown or over is ignored."""
        for sequence in self._scheduler.abort(request_id, choice):
            self._outputs.append(self._output(sequence, [], sequence.n_output, finish_reason=reason))
            self._forget(sequence)
        self._rest()

    def abort_all(self) -> None:
        """End every request, as `abort`."""
        for request_id in self._scheduler.request_ids:
            self.abort(request_id)

    def step(self) -> list[SequenceOutput]:
        """Finish the step in flight and start the next one; returns what the finished one added to each sequence.

        Nothing to do, or nothing finished yet: the empty list. When a step fails its exception is raised, and the engine is as if
        the step had never been started: what it would have computed is planned again.
        """
        self._finish()
        self.start_step()
        return self._told()

    def take_leases(self) -> list[Leased]:
        """Those that steps have given since it was last asked."""
        leases, self._leases = self._leases, []
        return leases

    def reserve(self, key: Hashable, request: Generate) -> int | None:
        """Make room for frames that others have computed of a request, which is added when they have come; see `Transit.reserve`.
        None, too, if there would be no place in the batch for it.

        Raises as `add` does."""
        self._check(request)
        if self._scheduler.n_running + self.transit.n_reserved >= self.info.max_batch_size:
            return None
        tokens = request.prompt + request.output.get(0, [])
        return self.transit.reserve(key, tokens, request.cache_salt, GROWTH * self._scheduler.spare)

    def next_ones(self) -> Iterable[Sequence]:
        """Waiting sequences for which there is a place in the batch, in order of service."""
        return itertools.islice(self._scheduler.waiting(), max(0, self.info.max_batch_size - self._scheduler.n_running))

    def make_room(self, key: Hashable, sequence: Sequence) -> int | None:
        """Take frames for what a store has of a waiting sequence, if it could be admitted now; see `Transit.reserve`."""
        if self._scheduler.n_running + self.transit.n_reserved >= self.info.max_batch_size:
            return None
        return self.transit.reserve(key, sequence.token_ids, sequence.cache_salt, self._scheduler.spare, brief=True)

    def finish_step(self) -> list[SequenceOutput]:
        """The first half of `step`, for a caller that tells what it gave, or hears what has come, before the next one is planned."""
        self._finish()
        return self._told()

    def give_way(self) -> None:
        """Have each computing thread give its CPU away once, before it begins with the next step: to be called when somebody has
        been woken who may want it. If nobody does, it costs a microsecond."""
        self._runner.give_way()

    def start_step(self) -> None:
        """The second half of `step`. Nothing may be in flight."""
        assert self._flight is None, "a step is finished before the next one is started"
        if self.speculator is not None:
            self.speculator.draft(self._generations, self._scheduler.decoding(), self._scheduler.lend)
        step = self._scheduler.schedule(self._clock.now())
        if step is not None:
            self._started = self._clock.now()
            self._flight = self._runner.start(step)
        self._rest()

    def stats(self) -> Stats:
        """O(running sequences), and some vector operations over the pool's frames: a fraction of a millisecond."""
        kv = self._scheduler.kv
        frames, use = kv.counts(), kv.use()
        return Stats(
            running=self._scheduler.n_running,
            waiting=self._scheduler.n_waiting,
            kv_total=frames.total,
            kv_free=frames.free,
            kv_cached=frames.cached,
            kv_held=frames.held,
            kv_shared=frames.shared,
            kv_saved=use.references - frames.held,
            kv_frame_bytes=self.info.kv_bytes_per_token * FRAME // kv.n_groups,
            kv_unfilled=use.unfilled,
            kv_pages=use.pages,
            kv_dropped=use.dropped,
            kv_sparsified=self._scheduler.n_tainted,
            kv_ended=self._over_budget,
            kv_refused=self._scheduler.n_refused,
            prefix_queries=self._scheduler.prefix_queries,
            prefix_hits=self._scheduler.prefix_hits,
            preemptions=self._scheduler.n_preemptions,
            evictions=frames.evictions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
            speculation=None if self.speculator is None else copy.deepcopy(self.speculator.total),
        )

    def check_integrity(self) -> None:
        """Find every frame's owner from scratch; raises AssertionError."""
        self._scheduler.check_integrity(len(self.transit))
        assert len(self._generations) == self._scheduler.n_running + self._scheduler.n_waiting, "a generation outlived its sequence"

    def close(self) -> None:
        """Forget all sequences; memory goes with the object."""
        for sequence in list(self._generations):
            self.abort(sequence.request_id)
        self.finish_step()

    def _finish(self) -> None:
        if self._flight is None:
            return
        flight, self._flight = self._flight, None  # also when it fails
        proposals = self.speculator.proposals if self.speculator is not None and self.speculator.rejects else None
        result = self._runner.finish(flight, self._generations, proposals)
        for sequence, tokens in result.tokens.items():
            del tokens[self._length(sequence, tokens) :]
        if self.filling is not None:
            self.filling.stepped(flight.step, self._clock.now() - self._started)
        self._scheduler.commit(flight.step, result.tokens, result.weights)
        took = self._clock.now() - self._started
        self._scheduler.learn(flight.step, took)
        if self.speculator is not None:
            self.speculator.learn(flight.step, result.tokens, took)
        for work in flight.step:
            if work.sequence.hands_over and work.sequence.running:
                self._lease(work.sequence)
        self._commit(result, {work.sequence: len(work.draft) for work in flight.step if work.draft})
        self._steps += 1

    def _told(self) -> list[SequenceOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _check(self, request: Generate) -> None:
        params = request.params
        assert params.max_tokens is not None, "max_tokens is resolved by the sender"
        params.check(self.info.vocab_size)
        if self._scheduler.serves(request.request_id):
            raise InvalidRequest(
                f"request id {request.request_id!r} belongs to a request that is being served: send another id", param="request_id"
            )
        room_after(len(request.prompt), self.info.max_model_len, params.max_tokens)
        for token in request.prompt:
            if not 0 <= token < self.info.vocab_size:
                raise InvalidRequest(f"the prompt holds token id {token}, but ids lie in [0, {self.info.vocab_size})", param="prompt")

    def _commit(self, result: StepResult, drafted: Mapping[Sequence, int]) -> None:
        """Tell what came out of a step, and end the sequences that are over. drafted: lengths of the drafts that it verified."""
        for sequence, found in result.prompt.items():
            self._generations[sequence].prompt_logprobs.update(found)
        for sequence, tokens in result.tokens.items():
            output = self._extend(sequence, tokens, result)
            output.drafted = drafted.get(sequence, 0)
            if output.finish_reason is not None or sequence.hands_over:
                self._scheduler.finish(sequence)
                self._forget(sequence)
            self._outputs.append(output)
            self._generation_tokens += len(output.tokens)

    def _length(self, sequence: Sequence, tokens: list[int]) -> int:
        """How many of the tokens are left if the sequence ends at the first that ends it."""
        ends = self._generations[sequence].ends
        return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))

    def _extend(self, sequence: Sequence, tokens: list[int], result: StepResult) -> SequenceOutput:
        """What a sequence's new tokens are, and whether they are the last."""
        generation = self._generations[sequence]
        broken = tokens[-1] == NO_TOKEN
        output = self._output(sequence, tokens[:-1] if broken else tokens, sequence.n_output - len(tokens))
        for token in output.tokens:
            generation.sampler.observe(token)
        if output.tokens and sequence in result.logprobs:
            output.logprobs = result.logprobs[sequence][: len(output.tokens)]
        if sequence.params.prompt_logprobs is not None and sequence.n_output == len(tokens):
            found = generation.prompt_logprobs
            output.prompt_logprobs = [None, *(found[p] for p in range(1, sequence.prompt_len))]
        if broken:
            output.finish_reason = FinishReason.BROKEN
        elif tokens[-1] in generation.ends:
            output.finish_reason, output.stop_token = FinishReason.STOP, tokens[-1]
        elif sequence.n_output == sequence.params.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        elif sequence.over_budget:
            output.finish_reason = FinishReason.KV_BUDGET
            self._over_budget += 1
        return output

    def _lease(self, sequence: Sequence) -> None:
        """Keep for others the whole frames that it has filled since the last time."""
        start, stop = self._leased[sequence], sequence.computed // FRAME * FRAME
        if stop <= start:
            return
        epoch = self._generations[sequence].epoch
        key = (sequence.request_id, sequence.choice, epoch, stop)
        place = self.transit.lease(key, sequence.token_ids, sequence.cache_salt, start, stop)
        if place is not None:
            self._leased[sequence] = stop
            self._leases.append(Leased(key, sequence.request_id, epoch, place))

    def _forget(self, sequence: Sequence) -> None:
        del self._generations[sequence]
        self._leased.pop(sequence, None)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        if self.filling is not None:
            self.filling.forget(sequence)

    def _output(self, sequence: Sequence, tokens: list[int], index: int, finish_reason: FinishReason | None = None) -> SequenceOutput:
        return SequenceOutput(
            request_id=sequence.request_id,
            choice=sequence.choice,
            tokens=tokens,
            finish_reason=finish_reason,
            cached_tokens=sequence.cached_tokens,
            first_scheduled=sequence.first_scheduled or 0.0,
            sparsified_from=sequence.sparsified_from,
            dropped_tokens=sequence.dropped_tokens[: len(tokens)],
            epoch=self._generations[sequence].epoch,
            index=index,
            reused=sequence.reused,
        )

    def _rest(self) -> None:
        """At every idle point: nothing is held, and in checked runs every frame's owner is found anew."""
        if self._scheduler.has_work:
            return
        held = self._scheduler.kv.n_held
        assert held == 0 or self.transit, f"the engine is idle, but {held} KV frames are held"
        if self._check_when_idle:
            self.check_integrity()
