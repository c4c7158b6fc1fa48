"""Workers of one nursery with a real model: whose answers they give, and what of their memory is there once."""

from __future__ import annotations

import os
import re
from pathlib import Path

import hearing
import msgspec
import nurseries
import pytest
import serving

from tokenmill.cluster.process import WorkerProcess
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.messages import Generate, SequenceOutput
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.loading import load_model
from tokenmill.kernels.native import Pool
from tokenmill.models.loader import load

MEMORY = {"memory_budget_gb": 0.1}
COMPRESSION = {"enabled": True, "key_dtype": "int8", "value_dtype": "int4"}
PROMPTS = [[1, 504, 3575, 282, 4649, 314], list(range(40, 300)), [7] * 33]
REQUESTS = [
    Generate(
        request_id=f"r{i}", prompt=prompt, params=SamplingParams(max_tokens=24, seed=i, temperature=0.8 * (i % 2), logprobs=3, n=1 + i % 2)
    )
    for i, prompt in enumerate(PROMPTS)
]

Answers = dict[tuple[str, int], list[object]]


def settings(path: Path, **more: object) -> EngineConfig:
    return EngineConfig.from_settings(**{"model": str(path), "max_model_len": 1024, "kv_cache_config": MEMORY} | more)


def gather(outputs: list[SequenceOutput]) -> Answers:
    """Tokens and log-probabilities by choice."""
    found: Answers = {}
    for output in outputs:
        assert output.logprobs is not None or not output.tokens
        found.setdefault((output.request_id, output.choice), []).extend(zip(output.tokens, output.logprobs or (), strict=True))
    return found


def expected(config: EngineConfig) -> Answers:
    """What an engine of this process says, one request after the other."""
    engine, outputs = build_engine(config), []
    for request in REQUESTS:
        engine.add(request)
        while engine.has_work:
            outputs += engine.step()
    engine.close()
    return gather(outputs)


async def answers(worker: WorkerProcess) -> Answers:
    return gather(await hearing.collect(worker.client, *REQUESTS))


def memory_of(pid: int, *fields: str) -> list[int]:
    """Bytes, by /proc/PID/smaps_rollup."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = dict(re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE))
    return [1024 * int(found[field]) for field in fields]


async def test_workers_of_other_thread_counts_answer_as_an_engine_that_was_not_forked(smollm2_path: Path) -> None:
    config = settings(smollm2_path, threads=2)
    wanted = expected(config)
    assert all(len(tokens) == 24 for tokens in wanted.values())
    async with nurseries.open_ward(config) as ward:
        workers = [await ward.loaded(msgspec.structs.replace(config, threads=threads)) for threads in (2, 1, 3)]
        assert [info.threads for _, info in workers] == [2, 1, 3]
        assert len({info.fingerprint for _, info in workers}) == 1
        for worker, _ in workers:
            assert await answers(worker) == wanted
        workers[0][0].kill()
        await workers[0][0].wait()
        again, _ = await ward.loaded()
        assert await answers(again) == wanted


async def test_a_draft_model_and_what_was_calibrated_are_shared_too_and_a_worker_may_do_without_the_draft(
    smollm2_path: Path, tmp_path: Path
) -> None:
    """The folder is gone when the workers are forked: they read nothing of it."""
    link = tmp_path / "models" / "smol.gguf"
    link.parent.mkdir()
    link.symlink_to(smollm2_path)
    config = settings(
        link,
        threads=2,
        kv_cache_config=MEMORY | {"compression": COMPRESSION},
        attention_config={"sparse_attention": {"enabled": True}},
        speculative_config={"model": str(link), "num_speculative_tokens": 4},
    )
    wanted = expected(config)
    async with nurseries.open_ward(config) as ward:
        first, drafting = await ward.loaded()
        (nursery,) = serving.child_pids(os.getpid())
        assert len(os.listdir(f"/proc/{nursery}/task")) == 1, "threads are lost in a fork, with what they hold"
        link.parent.rename(tmp_path / "elsewhere")
        second, info = await ward.loaded(msgspec.structs.replace(config, speculative_config=EngineConfig(model="").speculative_config))
        assert (drafting.proposer is None, info.proposer is None) == (False, True)
        assert info.fingerprint == drafting.fingerprint
        assert await answers(first) == await answers(second) == wanted
        assert (await first.client.stats()).speculation is not None


async def test_weights_are_in_memory_once_and_keep_their_large_pages(smollm2_path: Path) -> None:
    weights = load(smollm2_path, Pool(1)).weight_bytes
    async with nurseries.open_ward(settings(smollm2_path, threads=1)) as ward:
        _, alone = await ward.loaded()
        (nursery,) = serving.child_pids(os.getpid())
        workers = [alone] + [(await ward.loaded())[1] for _ in range(3)]
        (large,) = memory_of(nursery, "AnonHugePages")
        assert large or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        for info in workers:
            resident, own, kept = memory_of(info.pid, "Rss", "Private_Dirty", "AnonHugePages")
            assert resident > weights
            assert own < weights / 2
            assert kept >= large
        shared_out = [memory_of(pid, "Pss")[0] for pid in (nursery, *(info.pid for info in workers))]
        assert sum(shared_out) < 2 * weights + 5 * 40e6, "five processes with the weights once"


async def test_answers_write_to_no_weights(smollm2_path: Path) -> None:
    weights = load(smollm2_path, Pool(1)).weight_bytes
    async with nurseries.open_ward(settings(smollm2_path, threads=2)) as ward:
        worker, info = await ward.loaded()
        await answers(worker)
        (shared,) = memory_of(info.pid, "Shared_Dirty")
        assert shared > 0.98 * weights


async def test_a_model_that_cannot_be_loaded_is_told_before_there_is_a_worker(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    async with nurseries.open_ward(settings(broken)) as ward:
        with pytest.raises(Exception, match=r"broken\.gguf") as caught:
            await ward.spawn()
        assert caught.value.__class__.__name__ == "ModelFileError"


async def test_a_worker_that_cannot_be_built_is_told_and_the_next_one_can(smollm2_path: Path) -> None:
    config = settings(smollm2_path, threads=1)
    async with nurseries.open_ward(config) as ward:
        worker = await ward.spawn()
        with pytest.raises(ConfigError, match="max_model_len"):
            await worker.load(msgspec.structs.replace(config, max_model_len=10**6))
        assert await worker.wait() == 1
        await ward.loaded()


def test_an_engine_takes_no_memory_that_was_loaded_for_another(smollm2_path: Path) -> None:
    from tokenmill.engine.build import assemble
    from tokenmill.engine.shared import load_shared

    config = settings(smollm2_path, threads=1)
    shared = load_shared(config)
    compressed = msgspec.structs.replace(
        config, kv_cache_config=settings(smollm2_path, kv_cache_config=MEMORY | {"compression": COMPRESSION}).kv_cache_config
    )
    with pytest.raises(AssertionError, match="loaded for one like it"):
        assemble(compressed, shared, load_model(config).pool)
