"""The pool's threads: which CPUs they are kept on, and how they share one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.core.cpus import parse_cpus, show_cpus, usable_cpus
from tokenmill.core.errors import ConfigError
from tokenmill.kernels.ceilings import multiply_int8
from tokenmill.kernels.native import Pool

TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.skipif(not TASKS.exists(), reason="reads /proc")


def allowed(thread: int | str) -> str:
    """The CPUs that a thread of this process may run on."""
    found = re.search(r"^Cpus_allowed_list:\t(.+)$", (TASKS / str(thread) / "status").read_text(), re.MULTILINE)
    assert found
    return found[1]


@pytest.fixture
def cpus() -> Iterator[list[int]]:
    """All that there are, last first, so that an order that is not kept shows."""
    yield sorted(usable_cpus(), reverse=True)
    assert allowed(threading.get_native_id()) == show_cpus(usable_cpus())


@pytest.fixture
def two(cpus: list[int]) -> list[int]:
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    return cpus[:2]


def test_each_other_thread_is_kept_on_the_cpu_that_is_listed_for_it(cpus: list[int]) -> None:
    before = set(os.listdir(TASKS))
    pool = Pool(cpus=",".join(map(str, cpus)))
    new = sorted(set(os.listdir(TASKS)) - before, key=int)
    assert pool.threads == len(cpus) == len(new) + 1
    assert [allowed(thread) for thread in new] == [str(cpu) for cpu in cpus[1:]]


def test_without_a_list_threads_go_where_the_process_may_go() -> None:
    before = set(os.listdir(TASKS))
    pool = Pool(3)
    new = set(os.listdir(TASKS)) - before
    assert (pool.threads, pool.cpus, len(new)) == (3, None, 2)
    assert {allowed(thread) for thread in new} == {show_cpus(usable_cpus())}


@pytest.mark.parametrize("own_thread", [False, True])
def test_the_caller_is_kept_on_the_first_cpu_while_it_computes_and_no_longer(two: list[int], own_thread: bool) -> None:
    pool, seen, ended = Pool(cpus=f"{two[0]},{two[1]}"), threading.Event(), threading.Event()
    after: list[str] = []

    def watch(caller: int) -> None:
        while not (seen.is_set() or ended.is_set()):
            if allowed(caller) == str(two[0]):
                seen.set()

    def compute() -> None:
        watcher = threading.Thread(target=watch, args=(threading.get_native_id(),))
        watcher.start()
        for _ in range(10_000):
            multiply_int8(pool, 10_000)
            if seen.is_set():
                break
        ended.set()
        watcher.join()
        after.append(allowed(threading.get_native_id()))

    caller = threading.Thread(target=compute)
    if own_thread:
        caller.start()
        caller.join()
    else:
        caller.run()
    assert seen.is_set()
    assert after == [show_cpus(usable_cpus())]


def test_a_cpu_that_may_not_be_used_is_an_error_that_names_those_that_may(cpus: list[int]) -> None:
    beyond = max(cpus) + 1
    message = f"cpus lists {beyond}, which this process may not use or which does not exist: it may use {show_cpus(cpus)}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        Pool(cpus=f"{cpus[0]},{beyond}")


def test_a_system_that_cannot_keep_threads_on_cpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigError, match="this system cannot keep threads on CPUs"):
        Pool(cpus="0")


@pytest.mark.parametrize("text", ["", "x", "1,", ",1", "1-", "-1", "3-1", "0 1", "1024", "0-99999", "0x1", "²", "1" * 5000])
def test_what_is_no_list_of_cpus_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="must list CPUs up to 1023 such as 0-3,8"):
        parse_cpus(text, 0)


def test_a_list_of_cpus_keeps_its_order_and_names_each_once() -> None:
    assert parse_cpus("8,0-3", 0) == parse_cpus("8,0-3", 5) == (8, 0, 1, 2, 3)
    assert parse_cpus(None, 5) == ()
    with pytest.raises(ConfigError, match=r"lists 2-3 twice"):
        parse_cpus("0-3,2-4,3", 0)
    with pytest.raises(ConfigError, match=r"threads is 4, but cpus lists 5 \(8,0-3\)"):
        parse_cpus("8,0-3", 4)


@pytest.mark.parametrize(("cpus", "text"), [([], ""), ([3], "3"), ([1, 0], "0-1"), ([9, 2, 1, 0, 7], "0-2,7,9")])
def test_cpus_are_shown_as_ranges(cpus: list[int], text: str) -> None:
    assert show_cpus(cpus) == text


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_thread_that_shares_its_cpu_gives_way_between_runs_and_one_that_does_not_keeps_it(tmp_path: Path) -> None:
    source, driver = Path(__file__).with_name("turn.cpp"), tmp_path / "turn"
    include = Path(__file__).parents[2] / "native" / "src"
    subprocess.run(["g++", "-std=c++20", f"-I{include}", str(source), "-o", str(driver)], check=True)
    done = subprocess.run([str(driver)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


GIVE_WAY = """
import os, select, sys
import numpy as np
from tokenmill.kernels.native import PackedWeight, Pool
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
wake, called = os.pipe()[::-1]
said, answer = os.pipe()
if not os.fork():  # one that may not interrupt, but waits for its turn
    os.close(wake)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    while os.read(called, 1):
        os.write(answer, b"x")
    os._exit(0)
os.close(called)
pool = Pool(1)
let_in = 0
for _ in range(20):
    os.write(wake, b"x")
    if sys.argv[1] == "way":
        pool.give_way()
    PackedWeight.pack("Q8_0", 32, 32, np.zeros(32 * 34, np.uint8), pool)
    let_in += bool(select.select([said], [], [], 0)[0])
    os.read(said, 1)
print(let_in)
"""


def test_a_thread_that_gives_way_lets_in_who_waits_for_its_cpu() -> None:
    """Where others want the CPU too, who waits gets in even so; hence several tries to see that it does not."""

    def let_in(given: str) -> int:
        done = subprocess.run([sys.executable, "-c", GIVE_WAY, given], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert let_in("way") > 10
    assert any(let_in("no way") <= 10 for _ in range(8))


TOO_MANY = """
import resource
from tokenmill.core.errors import KernelError
from tokenmill.kernels.native import Pool
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (50 << 20),) * 2)  # room for a few stacks
try:
    Pool(500)
except KernelError as error:
    print(error)
print(Pool(2).threads)
"""


def test_threads_that_the_system_refuses_are_an_error_and_those_it_gave_end() -> None:
    said = subprocess.run([sys.executable, "-c", TOO_MANY], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    refused, after = said.stdout.splitlines()
    assert re.fullmatch(r"\[pool\] the system gives only \d+ of 500 threads: .+: ask for fewer threads", refused)
    assert after == "2"
