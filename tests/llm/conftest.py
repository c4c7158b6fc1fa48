from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill import LLM


@pytest.fixture(scope="session")
def shared_llm(smollm2_path: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_CHECK", "1")
        llm = LLM(smollm2_path, max_model_len=512, kv_cache_config={"memory_budget_gb": 0.25})
    yield llm
    llm.close()


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The real SmolLM2, every frame's owner checked whenever it is idle; a test must leave it without held frames."""
    yield shared_llm
    assert shared_llm.get_kv_cache_stats()["used_frames"] == 0
