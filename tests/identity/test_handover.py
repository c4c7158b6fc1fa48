"""Promise 1 across engines: a prompt that one engine computes and another goes on with is answered as by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from comparison import Alone, Answer, Setting
from request_pool import RequestPool
from traffic import Request

from tokenmill.core.kv_spelling import Format, kv_settings
from tokenmill.core.messages import Generate
from tokenmill.engine.engine import Engine, Leased
from tokenmill.kernels.frames import Frames
from tokenmill.weights.catalogue import resolve


class Pair:
    """A prefill and a decode engine, of other pools, pages and chunks. taken: bytes that went from one to the other. beside: what the
    decode engine answers meanwhile, one after another, so that a step of it is in flight whatever is done; with the answers so far."""

    def __init__(self, alone: Alone, prefill: Setting, decode: Setting, seed: int, beside: Sequence[Request] = ()) -> None:
        self.beside: list[tuple[Request, Answer]] = []
        self._to_come = list(beside)
        self.prefill, self.decode = (s.build(alone.model, alone.cache, alone.info.kv_bytes_per_token) for s in (prefill, decode))
        self.taken = 0
        self._rng = random.Random(seed)

    def answer(self, request: Request, name: str, salt: str) -> Answer:
        """Some of the frames may not come: what is missing is computed."""
        generate = Generate(request_id=name, prompt=list(request.prompt), params=request.params, eos_ids=request.eos_ids, cache_salt=salt)
        answer = Answer()
        self._step_decode(answer)
        reserved = self.decode.reserve(name, generate)
        self.prefill.add(generate, lease_from=0)
        while self.prefill.has_work:
            outputs = self.prefill.step()
            for leased in self.prefill.take_leases():
                self._step_decode(answer)
                if reserved is not None and self._rng.random() < 0.9:
                    self._take(name, leased)
                else:
                    reserved = None
                self.prefill.transit.release(leased.key)
            for output in outputs:
                self._add(answer, output)
        self.decode.transit.release(name)
        if answer.finish_reason is None:
            self.decode.add(msgspec.structs.replace(generate, output={0: answer.tokens.copy()}))
            while answer.finish_reason is None:
                self._step_decode(answer)
        return answer

    def finish(self) -> None:
        """What is answered beside, and nothing else: no frame is held."""
        while self.decode.has_work:
            self._step_decode(Answer())
        assert (self.prefill.stats().kv_held, self.decode.stats().kv_held) == (0, 0)
        self.decode.check_integrity()
        self.prefill.check_integrity()

    def _step_decode(self, answer: Answer) -> None:
        if not self.decode.has_work and self._to_come:
            request = self._to_come.pop()
            self.decode.add(Generate(request_id="beside", prompt=list(request.prompt), params=request.params, eos_ids=request.eos_ids))
            self.beside.append((request, Answer()))
        for output in self.decode.step():
            self._add(self.beside[-1][1] if output.request_id == "beside" else answer, output)

    def _take(self, name: str, leased: Leased) -> None:
        transit = self.decode.transit
        there, stop = transit.there(name), min(leased.place.stop, len(transit._reservation(name).tokens) // 8 * 8)
        if stop <= there:
            return
        place = transit.place(name, stop)
        assert place is not None
        theirs = [frames[(place.start - leased.place.start) // 8 :] for frames in leased.place.frames]
        assert [[f >= 0 for f in a] for a in theirs] == [[f >= 0 for f in b] for b in place.frames], "other positions are there than wanted"
        source, target = bytes_of(self.prefill, theirs), bytes_of(self.decode, place.frames)
        target.copy(source)
        self.taken += target.nbytes
        transit.land(name, stop)

    def _add(self, answer: Answer, output: Any) -> None:
        assert output.index == len(answer.tokens)
        answer.tokens += output.tokens
        answer.logprobs += output.logprobs or []
        answer.finish_reason, answer.stop_token = output.finish_reason, output.stop_token


def bytes_of(engine: Engine, frames: Any) -> Frames:
    numbers = [[frame for frame in of_group if frame >= 0] for of_group in frames]
    return engine._runner._tape.memory.frames(numbers)


def hand_over(pool: RequestPool, requests: list[Request], seed: int = 0, beside: Sequence[Request] = ()) -> None:
    prefill = Setting(max_batch_size=4, chunk_size=96, block_size=64, frames=400, threads=1)
    decode = Setting(max_batch_size=8, chunk_size=512, block_size=8, frames=300)
    pair = Pair(pool.alone, prefill, decode, seed, beside)
    one_choice = [r for r in requests if r.params.n == 1 and r.params.prompt_logprobs is None]
    assert len(one_choice) > 2
    for number, request in enumerate(one_choice * 2):
        same(pool, request, pair.answer(request, f"r{number}", f"{number % 3}"))
    pair.finish()
    for request, answer in pair.beside:
        same(pool, request, answer)
    assert pair.taken > 0
    assert bool(pair.beside) == bool(beside)


def same(pool: RequestPool, request: Request, answer: Answer) -> None:
    expected, *_ = pool.alone.answers(request)
    assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs), request
    assert (answer.finish_reason, answer.stop_token) == (expected.finish_reason, expected.stop_token), request


def test_a_prompt_that_is_handed_over_is_answered_as_by_one_engine(pool: RequestPool) -> None:
    hand_over(pool, [*pool.short[:14], *pool.long])


def test_frames_come_and_sequences_begin_while_a_step_is_in_flight(pool: RequestPool) -> None:
    streams = [request for request in [*pool.talkative, *pool.short] if request.params.n == 1 and request.params.prompt_logprobs is None]
    hand_over(pool, [*pool.short[14:28], *pool.long[:2]], seed=1, beside=streams)


def test_in_compressed_form(smollm2_path: Path) -> None:
    cache = kv_settings(Format.parse("int8/int4"), None, None)
    hand_over(pool := RequestPool(smollm2_path, 11, n_short=8, n_talkative=0, n_long=1, cache=cache), [*pool.short, *pool.long])


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["gemma3:270m", "qwen2.5-coder:0.5b"])
def test_of_other_models(model: str) -> None:
    hand_over(pool := RequestPool(resolve(model), 12, n_short=10, n_talkative=0, n_long=5), [*pool.short, *pool.long])
