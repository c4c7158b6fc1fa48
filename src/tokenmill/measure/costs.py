"""What a forward pass must at least read and compute, from a model's shape: floors without running anything. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.kernels.ops import Attention, Heads, Linear, Program
from tokenmill.measure.report import Ceilings
from tokenmill.models.loader import describe, needed
from tokenmill.models.source import Source

KV_BYTES = 4
"""Of one element of a key and its value, bf16 both."""


@dataclass(frozen=True)
class Costs:
    """weight_bytes: of the file, as far as a decode step reads them (of an embedding table that is not the output head too,
    it reads a few rows). products, wanted_products: weights multiplied for every token, and for those only whose logits are
    wanted. windows: of each layer, None for none.
    """

    weight_bytes: int
    products: int
    wanted_products: int
    shape: Heads
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, path: Path) -> Costs:
        """From a model's file or folder; nothing is loaded. Raises `ModelFileError`."""
        source = Source.open(path)
        _, program = describe(source)
        tensors = {name: source.tensor(name) for name in needed(program)[0] if name != "head" or source.has("head")}
        head = tensors.get("head", tensors["embed"])
        products = {"tokens": 0, "outputs": 0}
        for op in program.ops:
            if isinstance(op, Linear):
                products[op.x.rows] += sum(tensors.get(name, head).rows * op.x.width for name in op.weights)
        inner = [tensor for name, tensor in tensors.items() if name not in ("embed", "head")]
        return cls(
            weight_bytes=sum(tensor.data.nbytes for tensor in [*inner, head]),
            products=products["tokens"],
            wanted_products=products["outputs"],
            shape=program.shape,
            windows=windows_of(program),
        )

    def kv_bytes(self, context: int) -> int:
        """Read by a token that follows `context` others."""
        return KV_BYTES * self.shape.kv_heads * self.shape.head_dim * sum(_seen(window, context) for window in self.windows)

    def attention_operations(self, position: int, rows: int = 1) -> int:
        """Of `rows` tokens from `position` on: two products, of the query with keys and of the weights with values."""
        seen = sum(_seen(window, at + 1) for window in self.windows for at in range(position, position + rows))
        return 4 * self.shape.heads * self.shape.head_dim * seen

    def decode_floor(self, ceilings: Ceilings, streams: int, context: int) -> float:
        """Seconds of a step that adds one token to each of `streams` sequences of `context` tokens."""
        return ceilings.floor(
            read=self.weight_bytes + streams * self.kv_bytes(context),
            int8=2 * (self.products + self.wanted_products) * streams,
            bf16=streams * self.attention_operations(context),
        )

    def prefill_floor(self, ceilings: Ceilings, prompts: Sequence[int]) -> float:
        """Seconds until prompts of these lengths have their first logits."""
        return ceilings.floor(
            read=self.weight_bytes,
            int8=2 * (self.products * sum(prompts) + self.wanted_products * len(prompts)),
            bf16=sum(self.attention_operations(0, prompt) for prompt in prompts),
        )

    def answers_floor(self, ceilings: Ceilings, prompts: Sequence[int], outputs: Sequence[int]) -> float:
        """Seconds for all tokens of the answers after the first, if every step could serve all requests that are left."""
        contexts = [prompt + n for prompt, output in zip(prompts, outputs, strict=True) for n in range(output - 1)]
        return ceilings.floor(
            read=self.weight_bytes * (max(outputs, default=1) - 1) + sum(self.kv_bytes(context) for context in contexts),
            int8=2 * (self.products + self.wanted_products) * len(contexts),
            bf16=sum(self.attention_operations(context) for context in contexts),
        )


def windows_of(program: Program) -> tuple[int | None, ...]:
    return tuple(op.window for op in program.ops if isinstance(op, Attention))


def _seen(window: int | None, positions: int) -> int:
    return positions if window is None else min(window, positions)
