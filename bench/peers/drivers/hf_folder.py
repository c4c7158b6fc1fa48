"""Make a Hugging Face folder with bf16 weights out of a GGUF file, for engines that read nothing else. `python hf_folder.py GGUF FOLDER`"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(file: Path, folder: Path) -> None:
    """Dequantise to bf16; configuration and tokenizer come from the file's metadata."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    begins = GGUFReader(file).fields.get("tokenizer.ggml.add_bos_token")
    if begins is not None and begins.contents():  # lost on the way through transformers
        first = (tokenizer.bos_token, tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    tokenizer.save_pretrained(folder)
    how = GgufConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, quantization_config=how, dtype=torch.bfloat16)
    plain = type(read)(read.config).to(torch.bfloat16)  # what was read from GGUF counts as quantised, and would not be saved
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
