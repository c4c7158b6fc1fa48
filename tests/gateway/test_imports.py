from __future__ import annotations

import subprocess
import sys

HEAVY = {"numpy", "tokenizers", "safetensors", "huggingface_hub", "torch", "tokenmill._native", "tokenmill.kernels", "tokenmill.engine"}


def test_the_gateway_loads_no_native_code_and_no_model_library() -> None:
    modules = ["app", "server", "service", "chat", "completions", "openapi", "door"]
    source = "import sys; " + "; ".join(f"import tokenmill.gateway.{name}" for name in modules) + "; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.split()
    assert "tokenmill.gateway.app" in loaded
    assert HEAVY.isdisjoint(loaded)
