"""OpenVINO GenAI through the steps of its continuous batching pipeline, which reads GGUF files itself."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from lines import seconds_per_step, serve
from requantise import requantise, types

READABLE = {"F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"}
"""Tensor types of GGUF files that OpenVINO's reader knows."""


class OpenVINO:
    def version(self) -> str:
        return f"{genai.__version__.split('-')[0]} with OpenVINO {ov.__version__.split('-')[0]}"

    def prepare(self, model: str, folder: str) -> str:
        file, out = Path(model), Path(folder) / "readable.gguf"
        if types(file) <= READABLE:
            return model
        if not out.exists():
            part = out.with_suffix(".part")
            requantise(file, part, READABLE)
            part.rename(out)
        return str(out)

    def load(self, model: str, threads: int) -> None:
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = 2
        scheduling.max_num_batched_tokens = 512
        scheduling.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._ids = itertools.count()

    def complete(self, prompt: str, tokens: int) -> str:
        config = _greedy(tokens)
        config.apply_chat_template = False
        said: str = self._pipeline.generate([prompt], [config])[0].m_generation_ids[0]
        return said.removeprefix(prompt)

    def prefill(self, prompt: list[int]) -> float:
        [handle] = self._add([prompt], 1)
        started = time.perf_counter()
        while not handle.can_read():
            self._pipeline.step()
        spent = time.perf_counter() - started
        handle.read()
        return spent

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        handles = {str(i): handle for i, handle in enumerate(self._add(prompts, 512))}

        def step() -> list[str]:
            self._pipeline.step()
            come = [(name, handle.read()) for name, handle in handles.items() if handle.can_read()]
            return [name for name, outputs in come for output in outputs.values() for _ in output.generated_ids]

        seconds = seconds_per_step(step, len(prompts), steps)
        for handle in handles.values():
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return seconds

    def _add(self, prompts: list[list[int]], tokens: int) -> list[genai.py_openvino_genai.GenerationHandle]:
        return [self._pipeline.add_request(next(self._ids), ov.Tensor(np.array([prompt], np.int64)), _greedy(tokens)) for prompt in prompts]


def _greedy(tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.do_sample = False
    config.ignore_eos = True
    return config


if __name__ == "__main__":
    serve(OpenVINO())
