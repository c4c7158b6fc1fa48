"""Gemma 3 (text): scaled embeddings, normalised heads, norms before and after each branch, tanh-GELU.

Five layers of six see a window and rotate with base 10,000; every sixth sees all and rotates with the file's base. GGUF files
carry norm weights with their +1 folded in, Hugging Face folders do not (`norm_offset`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tokenmill.kernels.ops import AddNorm, Attention, Linear, Program, RMSNorm, RotateAndStore
from tokenmill.models import reading
from tokenmill.models.blocks import Buffers, begin, finish, project_qkv, select
from tokenmill.models.config import Fields, Layer, ModelConfig, inverse_frequencies
from tokenmill.models.source import Source

Frequencies = npt.NDArray[np.float64]

LOCAL_ROPE_BASE = 10000.0
GLOBAL_EVERY = 6
LOCAL, GLOBAL = 0, 1


def config(source: Source) -> ModelConfig:
    return _from_gguf(source) if source.is_gguf else _from_hf(source)


def _from_gguf(source: Source) -> ModelConfig:
    plain = reading.plain_decoder(source)
    local = inverse_frequencies(plain.shape.head_dim, LOCAL_ROPE_BASE)
    windows = [None if (i + 1) % GLOBAL_EVERY == 0 else layer.window for i, layer in enumerate(plain.layers)]
    scale = None
    if len(windows) == 62:  # GGUF files do not carry query_pre_attn_scalar; only the 27B model differs from head_dim
        scale = (plain.hidden / plain.shape.heads) ** -0.5
    return replace(_with_layers(plain, windows, local, plain.ropes[0]), attention_scale=scale)


def _from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.values)
    fields.refuse("final_logit_softcapping")
    fields.refuse("attn_logit_softcapping")
    fields.refuse("hidden_activation", "gelu_pytorch_tanh")
    plain = reading.plain_decoder(source)
    head_dim = plain.shape.head_dim
    if isinstance(source.values.get("rope_parameters"), dict):
        local = inverse_frequencies(head_dim, *reading.hf_rope(source.values, "sliding_attention"))
        whole = inverse_frequencies(head_dim, *reading.hf_rope(source.values, "full_attention"))
    else:
        local = inverse_frequencies(head_dim, fields.number("rope_local_base_freq", LOCAL_ROPE_BASE))
        whole = plain.ropes[0]
    windows = [layer.window for layer in plain.layers]
    if "layer_types" not in fields:
        every = fields.integer("sliding_window_pattern", 1024, default=GLOBAL_EVERY)
        windows = [None if (i + 1) % every == 0 else w for i, w in enumerate(windows)]
    scale = fields.number("query_pre_attn_scalar", float(head_dim)) ** -0.5
    return replace(_with_layers(plain, windows, local, whole), attention_scale=scale, norm_offset=1.0)


def _with_layers(plain: ModelConfig, windows: list[int | None], local: Frequencies, whole: Frequencies) -> ModelConfig:
    layers = tuple(Layer(GLOBAL if w is None else LOCAL, w) for w in windows)
    return replace(plain, layers=layers, ropes=(local, whole))


def program(c: ModelConfig) -> Program:
    b = Buffers.of(c)
    p = begin(c, b, embed_scale=c.hidden**0.5)
    for i, layer in enumerate(c.layers):
        project_qkv(p, c, b, i)
        p.add(RotateAndStore(b.qkv, i, c.shape, layer.rope, c.query_scale, False, f"{i}.q_norm", f"{i}.k_norm", c.eps))
        p.add(Attention(i, c.shape, b.attended, layer.window))
        if i == len(c.layers) - 1:
            b = select(p, b)
        p.add(Linear(b.attended, (f"{i}.o",), b.branch))
        p.add(AddNorm(b.x, b.branch, RMSNorm(f"{i}.post_attn_norm", c.eps)))
        p.add(Linear(b.x, (f"{i}.gate", f"{i}.up"), b.gated, RMSNorm(f"{i}.ffn_norm", c.eps), result="gelu_tanh"))
        p.add(Linear(b.gated, (f"{i}.down",), b.branch))
        p.add(AddNorm(b.x, b.branch, RMSNorm(f"{i}.post_ffn_norm", c.eps)))
    return finish(p, c, b)
