"""`PDRouter` from Python: what its settings mean, and a server of it in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import serving

from tokenmill import PDRouter
from tokenmill.core.errors import ConfigError
from tokenmill.core.roles import Role


def plans(prefill: list[dict[str, Any]], decode: list[dict[str, Any]]) -> dict[str, Any]:
    return {plan.name: plan.config for plan in PDRouter(prefill, decode)._plans}


def test_each_worker_has_its_own_settings_and_its_share_of_the_rest(smollm2_path: Path) -> None:
    model = {"model": str(smollm2_path)}
    found = plans([model | {"chunk_size": 1024, "threads": 3}], [model, model | {"max_batch_size": 9}])
    assert list(found) == ["prefill-0", "decode-0", "decode-1"]
    assert [config.role for config in found.values()] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    assert (found["prefill-0"].chunk, found["prefill-0"].threads, found["prefill-0"].cpus) == (1024, 3, None)
    assert (found["decode-0"].max_batch_size, found["decode-1"].max_batch_size) == (256, 9)
    budgets = {config.kv_cache_config.memory_budget_gb for config in found.values()}
    assert len(budgets) == 1


def test_a_budget_is_the_workers_own(smollm2_path: Path) -> None:
    model = {"model": str(smollm2_path)}
    found = plans([model], [model | {"kv_cache_config": {"memory_budget_gb": 0.25}}])
    assert found["decode-0"].kv_cache_config.memory_budget_gb == 0.25


def test_workers_share_one_store(smollm2_path: Path) -> None:
    model = {"model": str(smollm2_path), "kv_store_config": {"url": "embedded"}}
    router = PDRouter([model], [model, model])
    assert router._store is not None
    with router._store as server:
        stores = [plan.config.kv_store_config for plan in router._plans]
        assert [store and store.url for store in stores] == [server.url] * 3
    with pytest.raises(ConfigError, match="kv_store_config is not the same for all engines"):
        PDRouter([model], [{"model": str(smollm2_path)}])


def test_the_articles_settings_are_taken(smollm2_path: Path) -> None:
    model = {"model": str(smollm2_path), "gpu_memory_utilization": 0.5, "tensor_parallel_size": 1, "dtype": "auto"}
    prefill = model | {"enable_chunked_prefill": True, "chunk_size": 2048, "scheduler": "prefill_optimized"}
    decode = model | {"speculative_config": {"method": "suffix"}, "max_batch_size": 256, "scheduler": "decode_optimized"}
    found = plans(
        [prefill | {"kv_transfer_config": {"role": "prefill", "connector": "shm"}}],
        [decode | {"kv_transfer_config": {"role": "decode", "connector": "shm"}}],
    )
    assert found["prefill-0"].speculative_config.method is None
    assert found["decode-0"].speculative_config.method == "suffix"


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        ({"kv_cache_config": {"compression": {"enabled": True}}}, {}, "kv_cache_config.compression is not the same for all engines"),
        ({"kv_transfer_config": {"role": "decode"}}, {}, "role is decode, but the engine is among the prefill_engines"),
        ({"served_name": "a"}, {"served_name": "b"}, "served_name is not the same"),
        ({"chunk_sise": 5}, {}, "did you mean 'chunk_size'"),
        ({"kv_transfer_config": {"connector": "nccl"}}, {}, "shm, tcp, nixl"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_is_loaded(
    smollm2_path: Path, prefill: dict[str, Any], decode: dict[str, Any], said: str
) -> None:
    model = {"model": str(smollm2_path)}
    with pytest.raises(ConfigError, match=said):
        PDRouter([model | prefill], [model | decode])


def test_an_address_and_a_missing_model_are_told(smollm2_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenmill worker --join"):
        PDRouter(["10.0.0.7:4000"], [{"model": str(smollm2_path)}])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="names no model"):
        PDRouter([{}], [{"model": str(smollm2_path)}])
    with pytest.raises(ConfigError, match="nobody goes on"):
        PDRouter([{"model": str(smollm2_path)}], [])
    with pytest.raises(ConfigError, match="routing_strategy"):
        PDRouter([{"model": str(smollm2_path)}], [{"model": str(smollm2_path)}], routing_strategy="min_decode_que")


PROGRAM = """
import sys
from tokenmill import PDRouter

if __name__ == "__main__":
    model = {"model": sys.argv[1], "served_name": "smol", "max_model_len": 512, "threads": 1}
    PDRouter(prefill_engines=[model], decode_engines=[model], health_check_interval=5).serve(host="127.0.0.1", port=0)
"""


def test_it_serves(smollm2_path: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with serving.running([sys.executable, str(program), str(smollm2_path)]) as process:
        served = serving.Served(process, "")
        served.url = served.until_ready("ready").split(": ")[1].strip().removesuffix("/v1")
        with served.openai() as client:
            answer = client.completions.create(model="smol", prompt="The sky is", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        names = [worker["name"] for worker in served.get("/v1/workers").json()["data"]]
        assert names == ["prefill-0", "decode-0"]
        process.terminate()
        assert process.wait(20) == 0


def test_only_openai_is_spoken(smollm2_path: Path) -> None:
    model = {"model": str(smollm2_path)}
    with pytest.raises(ConfigError, match="api_type is 'grpc'"):
        PDRouter([model], [model]).serve(api_type="grpc")


