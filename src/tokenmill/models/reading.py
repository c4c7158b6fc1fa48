"""The part of a configuration that all architectures spell alike, in GGUF metadata and in a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import ModelFileError
from tokenmill.models.config import Fields, Layer, ModelConfig, inverse_frequencies, read_shape
from tokenmill.models.source import Source

Float64 = npt.NDArray[np.float64]

MAX_LAYERS, MAX_WIDTH, MAX_CONTEXT = 512, 1 << 17, 1 << 24


def plain_decoder(source: Source, *, interleaved: bool = False) -> ModelConfig:
    """The configuration of a decoder without peculiarities. `interleaved` says how GGUF files of this kind order q and k rows."""
    if source.is_gguf:
        return from_gguf(source.values, source.vocab, interleaved=interleaved, factors=source.rope_factors())
    return from_hf(source.values, source.vocab)


def from_gguf(metadata: Mapping[str, Any], vocab: int, *, interleaved: bool, factors: Float64 | None = None) -> ModelConfig:
    """A plain decoder from GGUF metadata.

    vocab: rows of the embedding. factors: `rope_freqs.weight` [head_dim / 2] by which frequencies are divided (the
    form in which GGUF files carry Llama 3's scaling).
    """
    architecture = str(metadata["general.architecture"])
    fields = Fields(metadata, f"{architecture}.")
    hidden = fields.integer("embedding_length", MAX_WIDTH)
    shape = read_shape(fields, "attention.head_count", "attention.head_count_kv", "attention.key_length", hidden)
    if fields.integer("attention.value_length", 512, default=shape.head_dim) != shape.head_dim:
        raise ModelFileError("keys and values of different widths are not supported", param="attention.value_length")
    if fields.integer("rope.dimension_count", 512, default=shape.head_dim) != shape.head_dim:
        raise ModelFileError("partial rotary embedding is not supported", param="rope.dimension_count")
    fields.refuse("expert_count", 0)
    fields.refuse("rope.scaling.type", "none", "linear")
    scaling = {"rope_type": "linear", "factor": fields.raw("rope.scaling.factor")} if fields.raw("rope.scaling.type") == "linear" else None
    inverse = inverse_frequencies(shape.head_dim, fields.number("rope.freq_base", 10000.0), scaling)
    if factors is not None:
        if factors.shape != inverse.shape or not np.all(factors > 0):
            raise ModelFileError(f"rope_freqs.weight must hold {len(inverse)} positive numbers", param="rope_freqs.weight")
        inverse = inverse / factors
    window = fields.integer("attention.sliding_window", MAX_CONTEXT) if "attention.sliding_window" in fields else None
    return ModelConfig(
        architecture=architecture,
        hidden=hidden,
        ffn=fields.integer("feed_forward_length", MAX_WIDTH),
        shape=shape,
        layers=(Layer(window=window),) * fields.integer("block_count", MAX_LAYERS),
        vocab=vocab,
        eps=fields.number("attention.layer_norm_rms_epsilon"),
        context=fields.integer("context_length", MAX_CONTEXT),
        ropes=(inverse,),
        interleaved=interleaved,
    )


def from_hf(config: Mapping[str, Any], vocab: int) -> ModelConfig:
    """A plain decoder from a Hugging Face config.json; `layer_types` decides which layers have the window."""
    fields = Fields(config)
    fields.refuse("attention_bias", False)
    fields.refuse("mlp_bias", False)
    hidden = fields.integer("hidden_size", MAX_WIDTH)
    shape = read_shape(fields, "num_attention_heads", "num_key_value_heads", "head_dim", hidden)
    count = fields.integer("num_hidden_layers", MAX_LAYERS)
    return ModelConfig(
        architecture=str(config["model_type"]),
        hidden=hidden,
        ffn=fields.integer("intermediate_size", MAX_WIDTH),
        shape=shape,
        layers=tuple(Layer(window=w) for w in hf_windows(fields, count)),
        vocab=vocab,
        eps=fields.number("rms_norm_eps", 1e-6),
        context=fields.integer("max_position_embeddings", MAX_CONTEXT),
        ropes=(inverse_frequencies(shape.head_dim, *hf_rope(config)),),
    )


def hf_rope(config: Mapping[str, Any], kind: str | None = None) -> tuple[float, Mapping[str, Any] | None]:
    """(theta, scaling) of a config.json: the older `rope_theta` + `rope_scaling`, or `rope_parameters`, per layer type or not."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping):
        if kind is not None and isinstance(parameters.get(kind), Mapping):
            parameters = parameters[kind]
        return Fields(parameters).number("rope_theta", 10000.0), parameters
    return Fields(config).number("rope_theta", 10000.0), config.get("rope_scaling")


def hf_windows(fields: Fields, count: int) -> list[int | None]:
    """The window of each layer, None for none."""
    if "sliding_window" not in fields or fields.raw("use_sliding_window") is False:
        return [None] * count
    window = fields.integer("sliding_window", MAX_CONTEXT)
    kinds = fields.raw("layer_types")
    if kinds is None:
        return [window] * count
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in ("full_attention", "sliding_attention") for k in kinds):
        raise ModelFileError(f"layer_types must name full_attention or sliding_attention for each of {count} layers", param="layer_types")
    return [window if k == "sliding_attention" else None for k in kinds]
