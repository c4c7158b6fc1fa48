"""An engine without a model, for tests of everything around one: it says its prompt again, token by token.

`EngineConfig.model` is a JSON object, the `Script`. Tokens 0..255 are bytes, 256 ends a sequence.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tokenmill.core import errors
from tokenmill.core.config import EngineConfig
from tokenmill.core.messages import EngineInfo, Generate, PageCounts, SequenceOutput, Stats
from tokenmill.core.types import FRAME, FinishReason, Speculation, TokenLogprobs
from tokenmill.worker.main import main

EOS = 256
VOCABULARY = 257


class Script(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What goes wrong, and when: `weights_…` in the process that forks engines, `load_…` in an engine's own. Steps are counted
    from 1; `once` is a file whose existence turns the fault off, and which the fault creates, so that the next process behaves."""

    once: str | None = None
    weights_error: str | None = None
    weights_exit: int | None = None
    weights_seconds: float = 0.0
    load_error: str | None = None
    load_exit: int | None = None
    load_seconds: float = 0.0
    load_hangs: bool = False
    raise_at: int | None = None
    exit_at: int | None = None
    hang_at: int | None = None
    step_seconds: float = 0.0
    refuse: str | None = None
    broken_at: int | None = None
    """The token of every answer, counted from 0, for which the model has no finite number."""
    max_model_len: int = 4096
    fingerprint: str = "f" * 32
    draft: int = 0
    """Tokens that each step guesses behind the first of an answer; some of them are right, more or fewer from step to step."""

    def spent(self) -> bool:
        return self.once is not None and os.path.exists(self.once)

    def spend(self) -> None:
        if self.once is not None:
            Path(self.once).touch()

    def fail(self, seconds: float, error: str | None, status: int | None) -> None:
        """What a load does."""
        time.sleep(seconds)
        if (error is None and status is None) or self.spent():
            return
        self.spend()
        if status is not None:
            os._exit(status)
        assert error is not None
        raise errors.ModelFileError(error)


def load(config: EngineConfig) -> Callable[[EngineConfig], ScriptedEngine]:
    """Engines of a script have nothing in common."""
    script = msgspec.json.decode(config.model, type=Script)
    if script.weights_seconds:
        print("loading weights", flush=True)
    script.fail(script.weights_seconds, script.weights_error, script.weights_exit)
    return ScriptedEngine


class Running:
    def __init__(self, request: Generate, choice: int) -> None:
        self.request = request
        self.choice = choice
        self.made = list(request.choices[choice])
        self.scheduled = 0.0
        self.aborted: FinishReason | None = None

    @property
    def frames(self) -> int:
        return -(-(len(self.request.prompt) + len(self.made)) // FRAME)

    def next_token(self) -> int:
        prompt, params = self.request.prompt, self.request.params
        if len(self.made) >= len(prompt) and not params.ignore_eos and len(self.made) >= params.min_tokens:
            return EOS
        return prompt[len(self.made) % len(prompt)]


class ScriptedEngine:
    def __init__(self, config: EngineConfig) -> None:
        self._script = script = msgspec.json.decode(config.model, type=Script)
        script.fail(script.load_seconds, script.load_error, script.load_exit)
        if script.load_hangs and not script.spent():
            script.spend()
            threading.Event().wait()
        self._config = config
        self._sequences: list[Running] = []
        self._counts = {"steps": 0, "prompt_tokens": 0, "generation_tokens": 0}
        self._speculation = Speculation() if script.draft else None
        self.info = EngineInfo(
            model=config.name, architecture="scripted", vocab_size=VOCABULARY, max_model_len=script.max_model_len, kv_tokens=80_000,
            kv_bytes=80_000, kv_bytes_per_token=1, kv_format="bf16", kv_bytes_saved_per_token=0,
            proposer="script" if script.draft else None,
            max_batch_size=config.max_batch_size, chunk_size=config.chunk, threads=1, kernels="none", fingerprint=script.fingerprint, pid=0,
            load_seconds=0.0,
        )  # fmt: skip

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    in_step = has_work

    def add(self, request: Generate) -> None:
        if self._script.refuse is not None:
            raise errors.KVBudgetTooSmall(self._script.refuse, param="max_tokens")
        self._sequences += [Running(request, choice) for choice in request.choices]

    def abort(self, request_id: str, choice: int | None, reason: FinishReason) -> None:
        for sequence in self._sequences:
            if sequence.request.request_id == request_id and choice in (None, sequence.choice):
                sequence.aborted = reason

    def abort_all(self) -> None:
        for sequence in self._sequences:
            sequence.aborted = FinishReason.ABORT

    def start_step(self) -> None:
        """Nothing: a step of this engine is done in `finish_step`."""

    def execute(self) -> None:
        """Nothing, too."""

    def give_way(self) -> None:
        """It has no threads."""

    def finish_step(self) -> list[SequenceOutput]:
        self._counts["steps"] += 1
        self._fail_as_told(self._counts["steps"])
        if self._script.step_seconds:
            threading.Event().wait(self._script.step_seconds)
        outputs = [output for sequence in self._sequences if (output := self._advance(sequence)) is not None]
        ended = {(output.request_id, output.choice) for output in outputs if output.finish_reason is not None}
        self._sequences = [s for s in self._sequences if (s.request.request_id, s.choice) not in ended]
        return outputs

    def stats(self) -> Stats:
        held = sum(sequence.frames for sequence in self._sequences)
        return Stats(
            running=len(self._sequences), waiting=0, kv_total=10_000, kv_free=10_000 - held, kv_cached=0, kv_held=held, kv_shared=0,
            kv_saved=0, kv_frame_bytes=FRAME, kv_unfilled=0, kv_pages={8: PageCounts(10_000 - held, held, 0, 0)}, kv_dropped=0,
            kv_sparsified=0, kv_ended=0, kv_refused=0, prefix_queries=0, prefix_hits=0, preemptions=0, evictions=0,
            speculation=self._speculation, **self._counts,
        )  # fmt: skip

    def close(self) -> None:
        assert not self._sequences, "closed with work left"

    def _advance(self, sequence: Running) -> SequenceOutput | None:
        request, params = sequence.request, sequence.request.params
        output = SequenceOutput(request.request_id, sequence.choice, [], epoch=request.epoch, index=len(sequence.made))
        if sequence.aborted is not None:
            output.finish_reason = sequence.aborted
            return output
        if not sequence.scheduled:
            sequence.scheduled = time.monotonic()
            self._counts["prompt_tokens"] += len(request.prompt)
            return None
        if len(sequence.made) == self._script.broken_at:
            output.finish_reason = FinishReason.BROKEN
            return output
        output.first_scheduled = sequence.scheduled
        if params.prompt_logprobs is not None and not sequence.made:
            output.prompt_logprobs = [None, *(likely(t, params.prompt_logprobs) for t in request.prompt[1:])]
        output.drafted = self._script.draft if sequence.made else 0
        for _ in range(1 + len(sequence.made) % (output.drafted + 1)):
            self._put_out(sequence, output)
            if output.finish_reason is not None:
                break
        if self._speculation is not None and output.drafted:
            self._speculation.add(output.drafted, len(output.tokens) - 1)
        return output

    def _put_out(self, sequence: Running, output: SequenceOutput) -> None:
        """One more token."""
        request, params = sequence.request, sequence.request.params
        token = sequence.next_token()
        sequence.made.append(token)
        self._counts["generation_tokens"] += 1
        output.tokens.append(token)
        if params.logprobs is not None:
            output.logprobs = [*(output.logprobs or ()), likely(token, params.logprobs)]
        if (token in request.eos_ids and not params.ignore_eos) or token in params.stop_token_ids:
            output.finish_reason, output.stop_token = FinishReason.STOP, token
        elif len(sequence.made) == params.max_tokens:
            output.finish_reason = FinishReason.LENGTH

    def _fail_as_told(self, step: int) -> None:
        script = self._script
        if step not in (script.raise_at, script.exit_at, script.hang_at) or script.spent():
            return
        script.spend()
        if step == script.exit_at:
            os._exit(9)
        if step == script.hang_at:
            threading.Event().wait()
        raise ZeroDivisionError("the script says so")


def likely(token: int, count: int) -> TokenLogprobs:
    """The token itself is the likeliest, then the ones after it."""
    return TokenLogprobs(token, -0.5, 0, tuple(((token + i) % 256, -0.5 - i) for i in range(count)))


def command() -> list[str]:
    """The command that a nursery starts in place of the real one."""
    return [sys.executable, "-P", __file__]


def config(**script: object) -> EngineConfig:
    """An engine config whose model is this script."""
    return EngineConfig(model=msgspec.json.encode(Script(**script)).decode(), served_name="parrot")  # type: ignore[arg-type]


if __name__ == "__main__":
    main(load)
