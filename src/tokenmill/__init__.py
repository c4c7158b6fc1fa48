"""tokenmill: an LLM inference engine and serving stack with a C++ kernel core.

Importing the package is cheap: native code and model libraries load when an engine is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "PDMetrics", "PDRouter", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from tokenmill.core.types import SamplingParams
    from tokenmill.gateway.pd_router import PDRouter
    from tokenmill.llm import LLM, AsyncLLM, RequestOutput
    from tokenmill.observe.separation import PDMetrics

_HOMES = {
    "LLM": "tokenmill.llm",
    "AsyncLLM": "tokenmill.llm",
    "PDMetrics": "tokenmill.observe.separation",
    "PDRouter": "tokenmill.gateway.pd_router",
    "RequestOutput": "tokenmill.llm",
    "SamplingParams": "tokenmill.core.types",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)
