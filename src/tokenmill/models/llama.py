"""Llama, SmolLM2, Mistral: rotary attention with grouped heads, RMS norms, SiLU-gated feed-forward.

Llama 3's frequency scaling comes as `rope_scaling` in config.json and as `rope_freqs.weight` in GGUF files, whose q and k rows
are ordered for interleaved pairs. Mistral's window, where a checkpoint has one, applies to all layers.
"""

from __future__ import annotations

from tokenmill.kernels.ops import Attention, Linear, Program, RotateAndStore
from tokenmill.models import reading
from tokenmill.models.blocks import Buffers, begin, finish, gated_ffn, project_qkv, select
from tokenmill.models.config import ModelConfig
from tokenmill.models.source import Source


def config(source: Source) -> ModelConfig:
    return reading.plain_decoder(source, interleaved=True)


def program(c: ModelConfig) -> Program:
    b = Buffers.of(c)
    p = begin(c, b)
    for i, layer in enumerate(c.layers):
        project_qkv(p, c, b, i)
        p.add(RotateAndStore(b.qkv, i, c.shape, layer.rope, c.query_scale, c.interleaved))
        p.add(Attention(i, c.shape, b.attended, layer.window))
        if i == len(c.layers) - 1:
            b = select(p, b)
        p.add(Linear(b.attended, (f"{i}.o",), b.x, result="add"))
        gated_ffn(p, c, b, i)
    return finish(p, c, b)
