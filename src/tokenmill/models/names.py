"""What the tensors of a layer are called: by programs, in GGUF files and in Hugging Face folders."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """File names of tensors. `layer` patterns take the layer number."""

    model: dict[str, str]
    layer: dict[str, str]

    def of(self, name: str) -> str:
        """The file's name of a program's `embed`, or of its `3.q` (tensor q of layer 3)."""
        if name in self.model:
            return self.model[name]
        number, _, part = name.partition(".")
        return self.layer[part].format(number)


_GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_ffn_norm": "post_ffw_norm.weight",
}

_HF_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}

_HF_GEMMA_LAYER = {
    **_HF_LAYER,
    "post_attn_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "post_ffn_norm": "post_feedforward_layernorm.weight",
}

GGUF = Names(
    {"embed": "token_embd.weight", "head": "output.weight", "final_norm": "output_norm.weight"},
    {part: f"blk.{{}}.{name}" for part, name in _GGUF_LAYER.items()},
)
_HF_MODEL = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "final_norm": "model.norm.weight"}
HF = Names(_HF_MODEL, {part: f"model.layers.{{}}.{name}" for part, name in _HF_LAYER.items()})
HF_GEMMA = Names(_HF_MODEL, {part: f"model.layers.{{}}.{name}" for part, name in _HF_GEMMA_LAYER.items()})
