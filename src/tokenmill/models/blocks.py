"""The pieces that decoder-only transformers share, written once: buffers, embedding, output head, gated feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.kernels.ops import Buffer, Embed, Linear, Program, RMSNorm, Select
from tokenmill.models.config import ModelConfig


@dataclass(frozen=True)
class Buffers:
    """Activations of a forward pass: residual stream, attention input and output, feed-forward, and a branch's result."""

    x: Buffer
    qkv: Buffer
    attended: Buffer
    gated: Buffer
    branch: Buffer

    @classmethod
    def of(cls, c: ModelConfig) -> Buffers:
        return cls(
            x=Buffer("x", c.hidden),
            qkv=Buffer("qkv", c.qkv_width),
            attended=Buffer("attended", c.shape.heads * c.shape.head_dim),
            gated=Buffer("gated", c.ffn),
            branch=Buffer("branch", c.hidden),
        )

    def wanted(self) -> Buffers:
        """Such buffers for the rows whose logits are wanted."""
        return Buffers(**{name: Buffer(f"wanted_{name}", b.width, "outputs") for name, b in vars(self).items()})


def begin(c: ModelConfig, b: Buffers, embed_scale: float = 1.0) -> Program:
    """A program that has looked its tokens up."""
    p = Program(c.shape, len(c.layers), ropes=list(c.ropes))
    p.add(Embed("embed", b.x, embed_scale))
    return p


def select(p: Program, b: Buffers) -> Buffers:
    """After the last layer's attention, the rest is computed for the rows whose logits are wanted only: of a prompt, one."""
    wanted = b.wanted()
    p.add(Select(b.x, wanted.x))
    p.add(Select(b.attended, wanted.attended))
    return wanted


def finish(p: Program, c: ModelConfig, b: Buffers) -> Program:
    """Add the final norm and the output head."""
    p.add(Linear(b.x, ("head",), Buffer("logits", c.vocab, "outputs"), RMSNorm("final_norm", c.eps)))
    return p


def gated_ffn(p: Program, c: ModelConfig, b: Buffers, layer: int) -> None:
    """x += down(silu(gate(norm(x))) * up(norm(x)))"""
    p.add(Linear(b.x, (f"{layer}.gate", f"{layer}.up"), b.gated, RMSNorm(f"{layer}.ffn_norm", c.eps), result="silu"))
    p.add(Linear(b.gated, (f"{layer}.down",), b.x, result="add"))


def project_qkv(p: Program, c: ModelConfig, b: Buffers, layer: int, bias: bool = False) -> None:
    """qkv = [q | k | v] of norm(x)"""
    names = (f"{layer}.q", f"{layer}.k", f"{layer}.v")
    p.add(Linear(b.x, names, b.qkv, RMSNorm(f"{layer}.attn_norm", c.eps), bias=f"{layer}.qkv_bias" if bias else None))
