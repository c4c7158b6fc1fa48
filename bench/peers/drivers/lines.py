"""A driver's side of the protocol: a JSON object per line in, one out. Standard library only, any Python from 3.9.

Requests are `{"do": NAME, …arguments}`, answers `{"ok": VALUE}` or `{"error": TEXT}`. The commands are the methods of
`Engine`, and `close`. An engine that prints to its standard output does not disturb: answers have a descriptor of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol


class Engine(Protocol):
    """What every engine can be asked. Prompts are token ids; all generation is greedy and goes on past end tokens."""

    def version(self) -> str: ...

    def prepare(self, model: str, folder: str) -> str:
        """The path to load for a GGUF file; what has to be converted is, once, into `folder`."""

    def load(self, model: str, threads: int) -> None: ...

    def complete(self, prompt: str, tokens: int) -> str:
        """The greedy continuation of a text."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from a prompt to its first greedy token."""

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds per step in which each of the prompts, computed before, gets one greedy token."""


def serve(engine: Engine) -> None:
    """Answer requests until `close` or the end of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        do = request.pop("do")
        answer: dict[str, Any]
        try:
            answer = {"ok": None if do == "close" else getattr(engine, do)(**request)}
        except Exception as error:
            traceback.print_exc()
            said = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {said[-1]}"}  # native libraries put their source lines first
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if do == "close":
            break
    os._exit(0)  # some engines hang or crash while their interpreter shuts down


def seconds_to_first(step: Callable[[], list[str]]) -> float:
    """Time an engine that schedules by itself until its first token. step: as below."""
    started = time.perf_counter()
    while not step():
        pass
    return time.perf_counter() - started


def seconds_per_step(step: Callable[[], list[str]], streams: int, steps: int) -> float:
    """Time an engine that schedules by itself. step: runs one of its steps, and returns the stream of each token that came out.

    The prompts are over once every stream has a token; from the next step on, all streams decode together.
    """
    begun: set[str] = set()
    while len(begun) < streams:
        begun.update(step())
    timed = 0
    started = time.perf_counter()
    while timed < steps * streams:
        timed += len(step())
    return (time.perf_counter() - started) * streams / timed
