"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v. Some key biases are in the hundreds."""

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
        project_qkv(p, c, b, i, bias=True)
        p.add(RotateAndStore(b.qkv, i, c.shape, layer.rope, c.query_scale))
        p.add(Attention(i, c.shape, b.attended, layer.window))
        if i == len(c.layers) - 1:
            b = select(p, b)
        p.add(Linear(b.attended, (f"{i}.o",), b.x, result="add"))
        gated_ffn(p, c, b, i)
    return finish(p, c, b)
