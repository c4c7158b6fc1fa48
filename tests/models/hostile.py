"""Damaged GGUF files through the whole loader and a few engine steps. Runs as a process of its own, since a fault may kill it.

`python hostile.py FOLDER FIRST LAST`: one file per number in [FIRST, LAST), a pure function of that number. The number begun
last stands in FOLDER/number; an error that no caller should see ends the process with its traceback.
"""

from __future__ import annotations

import faulthandler
import random
import resource
import struct
import sys
from functools import cache
from pathlib import Path

import numpy as np
from tiny_gguf import ARCHITECTURES, TinyModel

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import TokenmillError
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.text.chat import ChatTemplate, encode_chat
from tokenmill.weights.vocabulary import load_tokenizer

SECONDS = 10.0
"""That one file may take."""

MEMORY = 2**31
"""Bytes of address space that a whole run may map beyond what it has after its imports; the files are below 400 KB."""

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
VALUES = [None, 0, 1, -1, 2, 15, 16, 64, 97, 255, 2**31 - 1, 2**32 - 1, 0.0, -1.0, 1e-38, 1e11, float("nan"), float("inf"), True]
VALUES += ["", "gpt2", "llama", "x" * 5000, "{{ 1/0 }}", "{% for i in range(10**9) %}x{% endfor %}", "\x00", [1, 2], [0.5] * 97, ["a", "b"]]
INTEGERS = [0, 1, 2, 3, 7, 8, 12, 13, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8]


def vocabulary(architecture: str, size: int) -> dict[str, object]:
    """Tokenizer metadata for `size` tokens: SentencePiece with byte tokens does not fit a tiny vocabulary, so unknown is given."""
    letters = ["\u0120", "\u010a", "\u2581", *map(chr, range(ord("$"), ord("$") + size - 7))]
    common = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}
    tokens, types = ["<unk>", "<s>", "</s>", *letters, "ab"], [2, 3, 3, *[1] * (size - 3)]
    if architecture in ("qwen2", "qwen3"):
        keys = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": types, "merges": ["a b"], **common}
    else:
        keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": [-float(i) for i in range(size)], **common}
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return {**{f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "tokenizer.chat_template": template}


def model(architecture: str, kind: str) -> TinyModel:
    tiny = TinyModel(architecture, kind=kind, layers=2, context=64, tied=kind != "F16")
    tiny.other_metadata = vocabulary(architecture, tiny.vocab)
    return tiny


@cache
def whole(folder: Path, architecture: str, kind: str) -> bytes:
    return model(architecture, kind).write(folder / "whole.gguf").read_bytes()


def damaged(folder: Path, number: int) -> bytes:
    """File `number`: bytes changed anywhere or in the header, or a value put in place of another by a sound writer."""
    rng = random.Random(number)
    architecture, kind = rng.choice(ARCHITECTURES), rng.choice(KINDS)
    if number % 3 == 0:
        return _with_other_values(folder, rng, model(architecture, kind))
    data = bytearray(whole(folder, architecture, kind))
    header = data.index(b"blk.1.ffn_down.weight") + 64
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        _damage(data, rng, header if rng.random() < 0.8 else len(data))
    return bytes(data)


def _with_other_values(folder: Path, rng: random.Random, tiny: TinyModel) -> bytes:
    for _ in range(rng.choice([1, 1, 2])):
        metadata = rng.choice([tiny.metadata, tiny.other_metadata])
        metadata[rng.choice(sorted(metadata))] = rng.choice(VALUES)
    if rng.random() < 0.2:
        name = rng.choice(sorted(tiny.tensors))
        numbers = tiny.tensors[name]
        numbers.reshape(-1)[rng.randrange(numbers.size)] = rng.choice([np.nan, np.inf, -np.inf, 3e38, 1e-42])
    try:
        return tiny.write(folder / "other.gguf").read_bytes()
    except (struct.error, ValueError, TypeError, OverflowError):  # not even the writer can say it
        return b"GGUF"


def _damage(data: bytearray, rng: random.Random, end: int) -> None:
    at = rng.randrange(min(end, len(data) - 8))
    match rng.randrange(8):
        case 0 | 1:
            data[at] ^= 1 << rng.randrange(8)
        case 2:
            data[at] = rng.randrange(256)
        case 3:
            data[at : at + 8] = struct.pack("<Q", rng.choice(INTEGERS))
        case 4:
            data[at : at + 4] = struct.pack("<I", rng.choice(INTEGERS) & 0xFFFFFFFF)
        case 5:
            start, length = rng.randrange(end // 2), rng.choice([1, 4, 8, 32, 500])
            data[at : at + length] = data[start : start + length]
        case 6:
            data[at:at] = data[at : at + rng.choice([1, 8, 100])]
        case 7:
            del data[at : at + rng.choice([1, 8, 100, len(data)])]
    data += bytes(max(0, 16 - len(data)))


def serve(path: Path) -> str:
    """Load model and vocabulary and answer one request; the name of the error that refused it, or 'served'."""
    try:
        engine = build_engine(EngineConfig.from_settings(model=str(path), threads=1, kv_cache_config={"memory_budget_gb": 0.01}))
    except TokenmillError as error:
        return type(error).__name__
    try:
        tokenizer = load_tokenizer(path)
        template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_text, tokenizer.eos_text)
        tokens = tokenizer.encode("a ab b") + encode_chat(tokenizer, template, [{"role": "user", "content": "abc"}])
        tokenizer.decode(range(tokenizer.vocab_size))
        prompt = [token for token in tokens if token < engine.info.vocab_size][:32] or [0]
        params = SamplingParams(max_tokens=3, seed=1, logprobs=2, prompt_logprobs=1)
        engine.add(Generate(request_id="r", prompt=prompt, params=params, eos_ids=tuple(tokenizer.eos_ids)))
        while engine.has_work:
            engine.step()
    except TokenmillError as error:
        return type(error).__name__
    finally:
        engine.close()
    return "served"


def main(folder: Path, first: int, last: int) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    counts: dict[str, int] = {}
    for number in range(first, last):
        (folder / "number").write_text(str(number))
        (folder / "file.gguf").write_bytes(damaged(folder, number))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        outcome = serve(folder / "file.gguf")
        faulthandler.cancel_dump_traceback_later()
        counts[outcome] = counts.get(outcome, 0) + 1
    print(counts)


if __name__ == "__main__":
    faulthandler.enable()
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
