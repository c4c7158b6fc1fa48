"""Qwen3: a Llama whose query and key heads are normalised before they are rotated."""

from __future__ import annotations

from tokenmill.kernels.ops import Attention, Linear, Program, RotateAndStore
from tokenmill.models import reading
from tokenmill.models.blocks import Buffers, begin, finish, gated_ffn, project_qkv, select
from tokenmill.models.config import ModelConfig
from tokenmill.models.source import Source


def config(source: Source) -> ModelConfig:
    return reading.plain_decoder(source)


def program(c: ModelConfig) -> Program:
    b = Buffers.of(c)
    p = begin(c, b)
    for i, layer in enumerate(c.layers):
        project_qkv(p, c, b, i)
        p.add(RotateAndStore(b.qkv, i, c.shape, layer.rope, c.query_scale, False, f"{i}.q_norm", f"{i}.k_norm", c.eps))
        p.add(Attention(i, c.shape, b.attended, layer.window))
        if i == len(c.layers) - 1:
            b = select(p, b)
        p.add(Linear(b.attended, (f"{i}.o",), b.x, result="add"))
        gated_ffn(p, c, b, i)
    return finish(p, c, b)
