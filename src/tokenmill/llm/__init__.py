"""The Python API: `LLM` for batches, `AsyncLLM` for streams, both with the engine in the calling process."""

from __future__ import annotations

from tokenmill.llm.offline import LLM
from tokenmill.llm.online import AsyncLLM
from tokenmill.llm.outputs import CompletionOutput, RequestMetrics, RequestOutput, Usage

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestMetrics", "RequestOutput", "Usage"]
