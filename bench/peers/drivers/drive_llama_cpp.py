"""llama.cpp through llama-cpp-python's low-level interface: one `llama_decode` per step, then an argmax over each row of logits."""

from __future__ import annotations

import time
from importlib.metadata import version

import llama_cpp as ll
import numpy as np
from lines import serve

STREAMS = 32
ROOM = 640
"""Tokens of context for each stream."""


class LlamaCpp:
    def version(self) -> str:
        return version("llama-cpp-python")

    def prepare(self, model: str, folder: str) -> str:
        return model

    def load(self, model: str, threads: int) -> None:
        ll.llama_backend_init()
        self._model = ll.llama_model_load_from_file(model.encode(), ll.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = ll.llama_context_default_params()
        params.n_ctx = STREAMS * ROOM
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = STREAMS
        params.n_threads = params.n_threads_batch = threads
        self._context = ll.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._vocabulary = ll.llama_model_get_vocab(self._model)
        self._words = ll.llama_vocab_n_tokens(self._vocabulary)
        self._batch = ll.llama_batch_init(512, 0, 1)

    def complete(self, prompt: str, tokens: int) -> str:
        text = prompt.encode()
        room = (ll.llama_token * (len(text) + 8))()
        count = ll.llama_tokenize(self._vocabulary, text, len(text), room, len(room), True, False)
        self._forget()
        token = self._prompt(0, list(room[:count]))
        said = b""
        piece = bytearray(256)
        view = (ll.ctypes.c_char * len(piece)).from_buffer(piece)
        for position in range(count, count + tokens):
            said += bytes(piece[: ll.llama_token_to_piece(self._vocabulary, token, view, len(piece), 0, False)])
            [token] = self._step([token], position)
        return said.decode(errors="replace")

    def prefill(self, prompt: list[int]) -> float:
        self._forget()
        started = time.perf_counter()
        self._prompt(0, prompt)
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        self._forget()
        tokens = [self._prompt(stream, prompt) for stream, prompt in enumerate(prompts)]
        at = len(prompts[0])
        started = time.perf_counter()
        for position in range(at, at + steps):
            tokens = self._step(tokens, position)
        return (time.perf_counter() - started) / steps

    def _forget(self) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(self._context), False)

    def _prompt(self, stream: int, prompt: list[int]) -> int:
        """Compute a prompt of at most 512 tokens; returns the token that follows."""
        last = len(prompt) - 1
        self._run([(token, position, stream, position == last) for position, token in enumerate(prompt)])
        return self._best(last)

    def _step(self, tokens: list[int], position: int) -> list[int]:
        """One token more for each stream."""
        self._run([(token, position, stream, True) for stream, token in enumerate(tokens)])
        return [self._best(stream) for stream in range(len(tokens))]

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, stream, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = stream
            batch.logits[i] = wanted
        status = ll.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, row: int) -> int:
        logits = ll.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._words,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp())
