"""vLLM on a CPU through the steps of its in-process engine. It has no kernels for these GGUF files there: it gets their weights in bf16."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

from lines import seconds_per_step, seconds_to_first, serve


class VLLM:
    def version(self) -> str:
        import vllm

        return str(vllm.__version__)

    def prepare(self, model: str, folder: str) -> str:
        out, part = Path(folder) / "bf16", Path(folder) / "part"
        if not out.exists():
            subprocess.run([sys.executable, str(Path(__file__).with_name("hf_folder.py")), model, str(part)], check=True)
            part.rename(out)
        return str(out)

    def load(self, model: str, threads: int) -> None:
        from vllm import LLM

        available = len(os.sched_getaffinity(0))
        if threads != available:
            raise ValueError(f"vLLM is bound to {available} CPUs, not {threads}")
        self._llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_batched_tokens=1024,
            max_num_seqs=64,
            enable_prefix_caching=False,
            async_scheduling=False,
            seed=0,
        )
        self._ids = itertools.count()

    def complete(self, prompt: str, tokens: int) -> str:
        from vllm import SamplingParams

        [answer] = self._llm.generate([prompt], SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)
        return str(answer.outputs[0].text)

    def prefill(self, prompt: list[int]) -> float:
        self._add(prompt, 1)
        return seconds_to_first(self._step)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        names = [self._add(prompt, 512) for prompt in prompts]
        seconds = seconds_per_step(self._step, len(prompts), steps)
        self._llm.llm_engine.abort_request(names)
        while self._llm.llm_engine.has_unfinished_requests():
            self._step()
        return seconds

    def _add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = str(next(self._ids))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _step(self) -> list[str]:
        """The request of each token."""
        return [output.request_id for output in self._llm.llm_engine.step() for _ in output.outputs[0].token_ids]


if __name__ == "__main__":
    serve(VLLM())
