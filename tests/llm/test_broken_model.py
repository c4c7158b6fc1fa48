"""What a user sees of a model file that is damaged where its reader cannot tell."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.core.errors import ModelBroken

BAD = 40000
GREEDY = SamplingParams(temperature=0, max_tokens=4)
SETTINGS = {"max_model_len": 128, "kv_cache_config": {"memory_budget_gb": 0.1}}


@pytest.fixture(scope="module")
def damaged(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with an embedding of one token whose scales are no numbers."""
    (table,) = (t for t in gguf.GGUFReader(smollm2_path).tensors if t.name == "token_embd.weight")
    data = bytearray(smollm2_path.read_bytes())
    row = table.n_bytes // int(table.shape[1])
    block = 20  # bytes for 32 weights of Q4_1: scale, minimum, nibbles
    for at in range(table.data_offset + BAD * row, table.data_offset + (BAD + 1) * row, block):
        data[at : at + 2] = b"\x00\x7e"
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    path.write_bytes(data)
    return path


def test_a_prompt_that_meets_the_damage_is_an_error_and_the_next_one_is_answered(damaged: Path, smollm2_path: Path) -> None:
    prompt = "The capital of France is"
    with LLM(smollm2_path, **SETTINGS) as whole, LLM(damaged, **SETTINGS) as llm:
        expected = whole.generate(prompt, GREEDY)[0].outputs[0].text
        ids = llm.tokenizer.encode(prompt)
        with pytest.raises(ModelBroken, match="no finite number for the next token"):
            llm.generate([prompt, [*ids, BAD]], GREEDY)
        with pytest.raises(ModelBroken):
            list(llm.stream_generate([*ids, BAD], GREEDY))
        assert llm.generate(prompt, GREEDY)[0].outputs[0].text == expected


async def test_so_it_is_for_asyncio(damaged: Path) -> None:
    async with AsyncLLM(damaged, **SETTINGS) as llm:
        with pytest.raises(ModelBroken):
            await anext(llm.generate([1, 2, BAD], GREEDY))
        assert (await llm.get_kv_cache_stats())["used_frames"] == 0
