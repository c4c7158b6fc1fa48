from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.core.config import AttentionConfig, CompressionConfig, KVCacheConfig, KVTransferConfig
from tokenmill.core.cpus import usable_cpus
from tokenmill.core.errors import ConfigError, ModelFileError, ModelNotFound, Unavailable

ARTICLE: list[tuple[dict[str, Any], str]] = [
    (
        {"kv_transfer_config": {"role": "prefill", "connector": "nccl", "target_nodes": ["a"]}},
        "kv_transfer_config is for workers, .* start workers with `tokenmill serve --prefill N --decode N` or PDRouter",
    ),
    ({"kv_transfer_config": KVTransferConfig(role="decode")}, "the engine of an LLM or AsyncLLM is in the calling process, alone"),
]

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_model_length": 10}, "unknown setting 'max_model_length': did you mean 'max_model_len'"),
    ({"kv_cache_config": {"memory_budget": 1}}, "unknown setting 'kv_cache_config.memory_budget': did you mean 'memory_budget_gb'"),
    ({"block_manager_config": {"block_size": 7}}, "block_size is 7"),
    ({"block_manager_config": {"block_size": "large"}}, "block_size is 'large', but must be one of: dynamic, a number"),
    ({"kv_cache_config": {"compression": {"key_dtype": "fp8"}}}, "kv_cache_config.compression.key_dtype is 'fp8'"),
    ({"kv_cache_config": {"compression": {"group_size": 48}}}, "group_size is 48, but must be a multiple of 32"),
    ({"kv_cache_config": {"compression": {"calibration_method": "percentile"}}}, "compression.calibration_method is 'percentile'"),
    ({"kv_cache_config": KVCacheConfig(compression={"enabled": "no"})}, "kv_cache_config.compression.enabled is 'no'"),  # type: ignore[arg-type]
    ({"kv_cache_config": {"compression": CompressionConfig(enabled=True, key_dtype="fp8")}}, "key_dtype is 'fp8'"),  # type: ignore[arg-type]
    ({"attention_config": AttentionConfig(sparse_attention={"strategy": "foo"})}, "strategy is 'foo'"),  # type: ignore[arg-type]
    ({"kv_cache_config": {"per_request_budget_gb": 0}}, "per_request_budget_gb is 0"),
    ({"kv_cache_config": {"per_request_budget_gb": 1e-6}}, "per_request_budget_gb is 1e-06, but the smallest sequence takes 184320 bytes"),
    ({"attention_config": {"sparse": {"enabled": True}}}, "unknown setting 'attention_config.sparse': did you mean 'sparse_attention'"),
    (
        {"attention_config": {"sparse_attention": {"strategy": "random"}}},
        "sparse_attention.strategy is 'random', but must be one of: topk_heads, ",
    ),
    ({"attention_config": {"sparse_attention": {"keep_ratio": 1}}}, "keep_ratio is 1.0, but must be at least 0 and below 1"),
    ({"attention_config": {"sparse_attention": {"trigger_threshold": 0}}}, "trigger_threshold is 0.0, but must be above 0"),
    ({"speculative_config": {"num_tokens": 4}}, "unknown setting 'speculative_config.num_tokens': did you mean 'num_speculative_tokens'"),
    ({"speculative_config": {"method": "self"}}, "speculative_config.method is 'self', but must be one of: draft, ngram, suffix, combined"),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 49}},
        "num_speculative_tokens is 49, but must be between 1 and 48",
    ),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2.5}}, "num_speculative_tokens is 2.5: Expected `int`"),
    ({"speculative_config": {"method": "ngram", "acceptance_threshold": float("nan")}}, "acceptance_threshold is nan, but must be between"),
    ({"speculative_config": {"num_speculative_tokens": 4}}, "says how to draft, but not who does: choose method suffix, or name"),
    ({"speculative_config": {"verify": "rejection"}}, "says how to draft, but not who does"),
    ({"speculative_config": {"method": "none", "model": "smollm2:135m"}}, "method none has no use for a model"),
    ({"speculative_config": "suffix"}, "speculative_config must be a mapping of settings, not str"),
    ({"speculative_config": {"method": "draft"}}, "method draft needs a model"),
    ({"speculative_config": {"method": "suffix", "model": "smollm2:135m"}}, "method suffix has no use for a model"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "num_speculative_tokens is 0, but must be between 1 and 48"),
    ({"speculative_config": {"method": "ngram", "acceptance_threshold": 1.5}}, "acceptance_threshold is 1.5, but must be between 0 and 1"),
    ({"speculative_config": {"method": "ngram", "verify": "typical"}}, "speculative_config.verify is 'typical'"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2: on a CPU threads do this work, use threads=2"),
    ({"dtype": "float16"}, "weights keep the precision of their file"),
    ({"worker_cls": "x"}, "there is one worker class"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5, but must be above 0 and at most 1"),
    ({"threads": "two"}, "threads is 'two'"),
    ({"scheduler": "decode_first"}, "scheduler is 'decode_first', but must be one of: prefill_optimized, decode_optimized, mixed"),
    ({"scheduler": "decode_optimized", "enable_chunked_prefill": False}, "which cuts prompts so that steps stay short, but enable_chunked"),
    ({"max_step_ms": 50}, "max_step_ms is 50, but scheduler mixed does not bound steps: leave it out, or choose scheduler decode_opt"),
    ({"scheduler": "decode_optimized", "max_step_ms": 0.5}, "max_step_ms is 0.5, but must be between 1 and 100000"),
    ({"chunk_size": 7}, "chunk_size is 7, but must be between 8 and 16384"),
    ({"cpus": 0}, "cpus is 0"),
    ({"cpus": "all"}, "cpus is 'all', but must list CPUs up to 1023 such as 0-3,8"),
    ({"cpus": "0", "threads": 2}, r"threads is 2, but cpus lists 1 \(0\)"),
    ({"cpus": "1023"}, "cpus lists 1023, which this process may not use or which does not exist: it may use "),
    ({"max_model_len": 10**6}, "max_model_len is 1000000, but the model's context is 8192"),
    ({"chat_template": "nowhere.jinja"}, r"chat_template is 'nowhere.jinja': neither a built-in template \(chatml\) nor a file"),
    ({"chat_template": 5}, "chat_template must be a name or a path, not int"),
]


@pytest.mark.parametrize(("settings", "message"), ARTICLE)
def test_a_setting_for_workers_says_how_they_are_started(settings: dict[str, Any], message: str) -> None:
    """The model does not exist either, which shows that nothing is fetched or loaded first."""
    for cls in (LLM, AsyncLLM):
        with pytest.raises(ConfigError, match=message):
            cls("no such model", **settings)


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_wrong_setting_is_told(smollm2_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(smollm2_path, **settings)


def test_settings_that_ask_for_what_is_there_anyway_are_accepted(smollm2_path: Path) -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 1, "dtype": "auto", "speculative_config": None, "kv_transfer_config": None}
    settings |= {"scheduler": "prefill_optimized", "chunk_size": None}
    compression = {"compression": {"enabled": False}, "memory_budget_gb": 0.1, "dtype": "auto", "eviction_policy": "lru"}
    blocks = {"version": "v2", "block_size": "dynamic", "enable_prefix_sharing": True, "prefix_sharing_strategy": "radix"}
    with LLM(smollm2_path, max_model_len=64, kv_cache_config=compression, block_manager_config=blocks, **settings) as llm:
        assert llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].text == " Paris"


def test_gpu_memory_utilization_is_the_share_of_free_memory_for_the_cache(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.engine.build.available_memory", lambda: 2**30)
    with LLM(smollm2_path, gpu_memory_utilization=0.125) as llm:
        frame = 8 * llm.info.kv_bytes_per_token
        assert llm.get_kv_cache_stats()["total_frames"] == 2**27 // frame


def test_a_model_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="did you mean smollm2:135m"):
        LLM("smolm2:135m")
    with pytest.raises(ConfigError, match="model is 5"):
        LLM(5)  # type: ignore[arg-type]
    damaged = tmp_path / "a.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        LLM(damaged)


def test_a_draft_model_that_is_not_there_or_not_whole_is_an_error(smollm2_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="did you mean smollm2:135m"):
        LLM(smollm2_path, speculative_config={"model": "smolm2:135m"})
    with pytest.raises(ModelNotFound, match=r"nowhere\.gguf"):
        LLM(smollm2_path, speculative_config={"model": str(tmp_path / "nowhere.gguf")})
    damaged = tmp_path / "a.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        LLM(smollm2_path, speculative_config={"model": str(damaged)})


def test_a_draft_model_of_another_vocabulary_is_an_error(smollm2_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(smollm2_path.read_bytes().replace(b"<|im_start|>", b"<|in_start|>"))
    with pytest.raises(ConfigError, match="has another vocabulary than the model it drafts for") as told:
        LLM(smollm2_path, max_model_len=64, speculative_config={"model": str(other)})
    assert told.value.param == "speculative_config.model"


def test_a_draft_model_is_told_by_its_name(smollm2_path: Path) -> None:
    with LLM(smollm2_path, max_model_len=64, speculative_config={"model": "smollm2:135m"}) as llm:
        assert (llm.info.proposer, llm.info.draft_model) == ("draft", smollm2_path.stem)
        assert llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].text == " Paris"


def test_a_model_goes_by_its_catalogue_name_its_file_or_the_name_it_is_given(smollm2_path: Path) -> None:
    for model, settings, name in [
        ("smollm2:135m", {}, "smollm2:135m"),
        (str(smollm2_path), {}, smollm2_path.stem),
        (smollm2_path, {"served_name": "smol"}, "smol"),
    ]:
        with LLM(model, max_model_len=64, **settings) as llm:
            assert llm.info.model == name


def test_a_closed_llm_says_so(smollm2_path: Path) -> None:
    llm = LLM(smollm2_path, max_model_len=64)
    stream = llm.stream_generate("The", SamplingParams(max_tokens=20))
    next(stream)
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("a"), lambda: llm.get_kv_cache_stats(), lambda: next(stream)):
        with pytest.raises(Unavailable, match="this LLM is closed: make a new one"):
            use()


def test_importing_the_package_and_its_parameters_loads_no_native_code_and_no_library() -> None:
    source = "import sys, tokenmill; from tokenmill import SamplingParams; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.split()
    assert "tokenmill.core.types" in loaded
    assert not {"tokenmill._native", "tokenmill.llm", "tokenmill.engine", "numpy", "tokenizers", "jinja2", "asyncio"} & set(loaded)


async def test_cpus_are_told_and_the_program_may_still_go_where_it_could(smollm2_path: Path) -> None:
    free = usable_cpus()
    cpus = str(max(free))
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(smollm2_path, max_model_len=64, cpus=cpus) as llm:
        assert (llm.info.threads, llm.info.cpus) == (1, cpus)
        assert llm.generate("The capital of France is", params)[0].outputs[0].text == " Paris"
        assert usable_cpus() == free
    async with AsyncLLM(smollm2_path, max_model_len=64, cpus=cpus) as online:
        assert [result.outputs[0].text async for result in online.generate("The capital of France is", params)] == [" Paris"]
        allowed = {os.sched_getaffinity(int(thread)) == free for thread in os.listdir("/proc/self/task")}
        assert allowed == {True}, "an engine of one thread has only its caller's, which is between two steps"


MEMORY = """
import asyncio, gc, os, sys, time
from tokenmill import LLM, AsyncLLM, SamplingParams

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

def use(model):
    with LLM(model, max_model_len=512, threads=2) as llm:
        llm.generate([[5] * 400], SamplingParams(max_tokens=4))
        return resident(), len(os.listdir("/proc/self/task"))

async def use_async(model):
    async with AsyncLLM(model, max_model_len=512, threads=2) as llm:
        async for _ in llm.generate([5] * 400, SamplingParams(max_tokens=4)):
            pass
        return resident(), len(os.listdir("/proc/self/task"))

model = sys.argv[1]
use(model)
gc.disable()
for make in (lambda: use(model), lambda: asyncio.run(use_async(model))):
    before = resident(), len(os.listdir("/proc/self/task"))
    during = make()
    deadline = time.monotonic() + 10  # a thread that has been joined may still be on its way out of the system's list
    while len(os.listdir("/proc/self/task")) > before[1] and time.monotonic() < deadline:
        time.sleep(0.001)
    after = resident(), len(os.listdir("/proc/self/task"))
    print(*before, *during, *after)
"""


def test_closing_gives_memory_and_threads_back(smollm2_path: Path) -> None:
    """Without the garbage collector: nothing may keep a closed engine alive in a cycle."""
    out = subprocess.run([sys.executable, "-c", MEMORY, str(smollm2_path)], capture_output=True, text=True, check=True).stdout
    lines = [[int(number) for number in line.split()] for line in out.splitlines()]
    assert len(lines) == 2
    for bytes_before, threads_before, bytes_during, threads_during, bytes_after, threads_after in lines:
        assert threads_after == threads_before < threads_during
        held = bytes_during - bytes_before
        assert held > 60e6, "the weights alone are larger"
        assert bytes_after - bytes_before < 0.2 * held
