from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tokenmill.llm.interrupts import interrupts_held

FUZZ = """
import os, random, signal, sys
from tokenmill import LLM, SamplingParams

os.environ["TOKENMILL_CHECK"] = "1"
seed = random.randrange(2**32)
print("seed", seed, flush=True)
draw = random.Random(seed)
WATCHED = tuple(f"/tokenmill/{room}/" for room in ("llm", "engine", "scheduler", "kv", "sampling"))
left = 0

def press(frame, event, arg):
    # Ctrl-C at one of the calls inside the package.
    global left
    if event == "call" and any(room in frame.f_code.co_filename for room in WATCHED):
        left -= 1
        if left == 0:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

prompts = ["The capital of France is", [7] * 40, "2+2="]
interrupted = 0
with LLM(sys.argv[1], max_model_len=256, kv_cache_config={"memory_budget_gb": 0.1}) as llm:
    short, long = SamplingParams(temperature=0, max_tokens=4), SamplingParams(max_tokens=100, n=2, ignore_eos=True)
    expected = [r.outputs for r in llm.generate(prompts, short)]
    while interrupted < 30:
        left = draw.randrange(1, 1500)
        sys.setprofile(press)
        try:
            llm.generate(prompts, long)
        except KeyboardInterrupt:
            interrupted += 1
        sys.setprofile(None)
        assert llm.get_kv_cache_stats()["used_frames"] == 0
        llm._running.check_integrity()
        assert not llm._collectors
    assert [r.outputs for r in llm.generate(prompts, short)] == expected
print("survived", interrupted)
"""


def test_ctrl_c_at_any_moment_leaves_the_llm_usable_and_no_frame_held(smollm2_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", FUZZ, str(smollm2_path)], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "survived 30" in result.stdout


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []

    def hold() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("the block")

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert done == ["the block"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_callers_own_handler_is_called_and_stays() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert len(calls) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_of_the_block_is_not_lost() -> None:
    def fail() -> None:
        with interrupts_held():
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    entered = []

    def hold() -> None:
        with interrupts_held():
            entered.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        hold()
    finally:
        signal.signal(signal.SIGINT, before)
    assert entered == [before, signal.SIG_IGN]
