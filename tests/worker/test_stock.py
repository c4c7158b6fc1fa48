"""A worker's engine beside a KV store: what it gives is what it would have computed, whatever becomes of the store meanwhile."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import TinyModel

from tokenmill.core.blocks import BLOCK
from tokenmill.core.config import EngineConfig, KVCacheConfig, KVStoreConfig
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import CHECK_VARIABLE, build_engine
from tokenmill.worker.stock import Stock, open_stock

PATIENCE = 60.0
FRAME_BYTES = 8 * 3 * 2 * 32 * 2 * 2


class Host:
    """An engine and its stock, and the loop around them. before_wait: is called when only fetches are left to wait for."""

    def __init__(self, model: Path, folder: Path, frames: int = 400, **settings: Any) -> None:
        store = KVStoreConfig(folder=str(folder))
        cache = KVCacheConfig(memory_budget_gb=(frames + 0.5) * FRAME_BYTES / 2**30)
        config = EngineConfig(model=str(model), threads=1, kv_cache_config=cache, kv_store_config=store, **settings)
        self.engine = build_engine(config)
        self.ended: queue.SimpleQueue[Hashable] = queue.SimpleQueue()
        self.stock: Stock = open_stock(store, self.engine, self.ended.put)
        self.before_wait: Callable[[], None] = lambda: None
        self.tokens: dict[tuple[str, int], list[int]] = {}

    def add(self, name: str, prompt: list[int], **settings: Any) -> None:
        params = SamplingParams(**({"max_tokens": 4, "temperature": 0.0, "seed": 0, "ignore_eos": True} | settings))
        self.engine.add(Generate(request_id=name, prompt=prompt, params=params))

    def run(self) -> dict[tuple[str, int], list[int]]:
        """Until nothing is left."""
        while self.engine.has_work or self.stock:
            self.stock.tick()
            self.engine.start_step()
            if not self.engine.in_step:
                self.before_wait()
                self.stock.fetched(self.ended.get(timeout=PATIENCE))
                continue
            for output in self.engine.finish_step():
                self.tokens.setdefault((output.request_id, output.choice), []).extend(output.tokens)
            self.stock.stepped()
            while not self.ended.empty():
                self.stock.fetched(self.ended.get())
        self.engine.check_integrity()
        assert self.engine.stats().kv_held == 0
        assert self.stock._store.drain(PATIENCE)
        tokens, self.tokens = self.tokens, {}
        return tokens

    @property
    def counts(self) -> dict[str, int]:
        return self.stock.stats().counts

    @property
    def fetched(self) -> int:
        return self.stock.stats().fetched_tokens


Open = Callable[..., Host]


@pytest.fixture
def open_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """open_host(architecture="llama", **settings): another host with the same model and store."""
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    hosts: list[Host] = []

    def make(architecture: str = "llama", **settings: Any) -> Host:
        model = tmp_path / f"{architecture}.gguf"
        if not model.exists():
            tiny = TinyModel(architecture, vocab=499, context=4096, layers=6 if architecture == "gemma3" else 3)
            if architecture == "gemma3":
                tiny.metadata["attention.sliding_window"] = 128
            tiny.write(model)
        hosts.append(Host(model, tmp_path / "store", **settings))
        return hosts[-1]

    yield make
    for host in hosts:
        host.stock.close()


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 499) for _ in range(length)]


def files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 300, 5 * BLOCK])
def test_another_engine_takes_whole_blocks_and_computes_the_rest(open_host: Open, length: int) -> None:
    first, second = open_host(), open_host()
    first.add("a", prompt(length))
    expected = first.run()
    second.add("a", prompt(length))
    assert second.run() == expected
    assert second.fetched == length // BLOCK * BLOCK


def test_what_an_engine_has_is_not_fetched(open_host: Open) -> None:
    first, second = open_host(), open_host()
    first.add("a", prompt(300))
    expected = first.run()
    second.add("before", prompt(300)[:100])
    second.run()
    assert second.fetched == BLOCK
    second.add("a", prompt(300))
    assert second.run() == expected
    assert second.fetched == BLOCK + 256 - 96, "96 were there, and 4 x 64 are in the store"


def test_those_with_the_same_beginning_wait_for_one_fetch(open_host: Open) -> None:
    first, second = open_host(), open_host()
    for host in (first, second):
        for number in range(3):
            host.add(f"r{number}", prompt(300) + prompt(number, seed=2), n=3, temperature=1.0)
        if host is first:
            expected = host.run()
    assert second.run() == expected
    assert (second.counts["fetches"], second.fetched) == (1, 256)


def test_tenants_do_not_share(open_host: Open) -> None:
    first, second = open_host(), open_host()
    first.add("a", prompt(200))
    first.run()
    second.engine.add(Generate(request_id="a", prompt=prompt(200), params=SamplingParams(max_tokens=1, seed=0), cache_salt="another"))
    second.run()
    assert second.fetched == 0


def test_whoever_is_preempted_is_looked_up_again(open_host: Open) -> None:
    host = open_host(frames=60)
    for number in range(4):
        host.add(f"r{number}", prompt(90, seed=number), max_tokens=60)
    crowded = host.run()
    assert host.engine.stats().preemptions > 0
    assert host.fetched > 0
    alone = open_host()
    for number in range(4):
        alone.add(f"r{number}", prompt(90, seed=number), max_tokens=60)
        assert alone.run() == {(f"r{number}", 0): crowded[f"r{number}", 0]}


def test_a_request_that_goes_while_its_blocks_come_leaves_nothing(open_host: Open) -> None:
    first, second = open_host(), open_host()
    first.add("a", prompt(300))
    first.run()
    second.add("a", prompt(300))
    second.before_wait = lambda: second.engine.abort("a")
    assert second.run() == {("a", 0): []}


def test_frames_that_others_need_are_given_up_in_the_midst(open_host: Open) -> None:
    first, second = open_host(), open_host()
    first.add("a", prompt(300))
    expected = first.run()
    second.add("a", prompt(300))

    def take() -> None:
        second.before_wait = lambda: None
        assert second.engine.transit.give_way(leases=True)
        second.ended.put("that of another fetch")

    second.before_wait = take
    assert second.run() == expected


def test_who_could_be_admitted_anyway_does_not_take_the_frames_of_a_fetch(open_host: Open) -> None:
    """It ends by itself, and soon."""
    first, second = open_host(), open_host(frames=60)
    first.add("a", prompt(300))
    first.run()
    second.add("a", prompt(300))
    second.add("b", prompt(200, seed=7))
    gone: list[bool] = []
    second.before_wait = lambda: gone.append(second.engine.transit.give_way(leases=False))
    second.run()
    assert gone
    assert not any(gone)
    assert second.fetched == 256


@pytest.mark.parametrize("harm", ["cut", "changed", "gone", "another"])
def test_what_is_wrong_with_an_entry_costs_time_alone(open_host: Open, tmp_path: Path, harm: str) -> None:
    first, second = open_host(), open_host()
    first.add("a", prompt(300))
    expected = first.run()
    entries = sorted(files(tmp_path))
    for entry, other in zip(entries, entries[1:] + entries[:1], strict=True):
        data = bytearray(entry.read_bytes())
        data[-1] ^= 1
        match harm:
            case "cut":
                entry.write_bytes(data[:-100])
            case "changed":
                entry.write_bytes(data)
            case "gone":
                entry.unlink()
            case "another":
                entry.write_bytes(other.read_bytes())
    second.add("a", prompt(300))
    assert second.run() == expected
    assert second.fetched == 0


def test_every_row_is_computed_for_prompt_logprobs(open_host: Open) -> None:
    first, second = open_host(), open_host()
    first.add("a", prompt(300))
    first.run()
    second.add("a", prompt(300), prompt_logprobs=0)
    second.run()
    assert (second.fetched, second.counts["fetches"]) == (0, 0)


@pytest.mark.parametrize("chunk", [64, 2048])
def test_windows(open_host: Open, chunk: int) -> None:
    """A chunk longer than the window leaves blocks without it, from which only who computes what follows can go on."""
    first, second = open_host("gemma3", chunk_size=chunk), open_host("gemma3", chunk_size=chunk)
    for length in (330, 700):
        first.add("a", prompt(length))
        expected = first.run()
        second.add("a", prompt(length))
        assert second.run() == expected
    assert second.fetched > 0


def test_of_windows_what_is_there_will_do_if_the_end_is_missing(open_host: Open, tmp_path: Path) -> None:
    first, second = open_host("gemma3", chunk_size=64), open_host("gemma3", chunk_size=64)
    first.add("a", prompt(400))
    first.run()
    kept = set(files(tmp_path))
    first.add("b", prompt(700))
    expected = first.run()
    for path in set(files(tmp_path)) - kept:
        path.unlink()
    second.add("b", prompt(700))
    assert second.run() == expected
    assert (second.counts["fetches"], second.fetched) == (2, 384)


def test_closing_ends_its_threads(open_host: Open) -> None:
    host = open_host()
    host.add("a", prompt(300))
    host.run()
    host.stock.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-store")]
