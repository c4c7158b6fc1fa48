"""Model files: every architecture in its variants is read, and each way of being wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_gguf import ARCHITECTURES, TinyModel

from tokenmill.core.errors import ModelFileError, UnknownArchitecture
from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.models.loader import ARCHITECTURES as KNOWN
from tokenmill.models.loader import load

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


@pytest.fixture
def pool() -> Pool:
    return Pool(1)


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    model = load(path, Pool(2))
    n = len(tokens)
    tape = Tape(model.program, model.weights, model.vectors, Pool(2), n, n, n // 8 + 1)
    table = np.zeros(1, np.int32)
    return tape.run(Batch(np.array(tokens, np.int32), [Segment(0, n, 0, (Pages(table, table),))], np.arange(n, dtype=np.int32))).copy()


@every_architecture
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("vocab", "kind"), [(33, "F32"), (97, "Q8_0"), (128, "BF16"), (101, "Q5_1"), (17, "F16"), (50, "Q4_0")])
def test_a_tiny_model_is_read(path, pool, architecture, tied, vocab, kind):
    model = load(TinyModel(architecture, vocab=vocab, tied=tied, kind=kind).write(path), pool)
    assert model.config.vocab == vocab
    assert (model.weights["head"] is model.weights["embed"]) == tied
    assert {w.form for w in model.weights.values()} == {kind}
    assert model.weight_bytes == sum({id(w): w.nbytes for w in model.weights.values()}.values())
    got = logits(path, [1, 5, 3])
    assert got.shape == (3, vocab)
    assert np.isfinite(got).all()
    assert np.ptp(got) > 1


@every_architecture
def test_a_tied_head_is_the_embedding(tmp_path, architecture):
    tied, copied = TinyModel(architecture), TinyModel(architecture)
    copied.tensors["output.weight"] = copied.tensors["token_embd.weight"]
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    np.testing.assert_array_equal(logits(tied.write(tmp_path / "a.gguf"), tokens), logits(copied.write(tmp_path / "b.gguf"), tokens))


@every_architecture
def test_every_tensor_counts(tmp_path, architecture):
    """Changing any one changes the logits: none is read for nothing, or twice under one name."""
    tokens = list(range(30))
    model = TinyModel(architecture, tied=False)
    whole = logits(model.write(tmp_path / "whole.gguf"), tokens)
    for name, tensor in model.tensors.items():
        other = TinyModel(architecture, tied=False)
        other.tensors[name] = tensor[::-1].copy()
        assert np.abs(logits(other.write(tmp_path / "other.gguf"), tokens) - whole).max() > 1e-3, name


def test_an_unknown_architecture_is_refused_with_the_known_ones(path, pool):
    TinyModel("mamba2").write(path)
    with pytest.raises(UnknownArchitecture, match=r"'mamba2' is not known; known are: .*gemma3.*llama.*qwen3") as refusal:
        load(path, pool)
    assert all(name in str(refusal.value) for name in KNOWN)


def test_a_file_without_an_architecture_is_refused(path, pool):
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    writer.add_uint32("general.architecture", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=r"general\.architecture.* is 7"):
        load(path, pool)


@every_architecture
def test_each_missing_tensor_is_named(path, pool, architecture):
    for name in TinyModel(architecture).tensors:
        model = TinyModel(architecture)
        del model.tensors[name]
        with pytest.raises(ModelFileError) as refusal:
            load(model.write(path), pool)
        assert f"tensor {name!r} is missing" in str(refusal.value)
        assert refusal.value.param == name


@every_architecture
def test_each_tensor_of_the_wrong_shape_is_named(path, pool, architecture):
    for name in TinyModel(architecture, tied=False).tensors:
        for axis in range(TinyModel(architecture, tied=False).tensors[name].ndim):
            model = TinyModel(architecture, tied=False)
            if (name, axis) == ("token_embd.weight", 0):
                name = "output.weight"  # the vocabulary is what the embedding has
                model.tensors["token_embd.weight"] = model.tensors["token_embd.weight"][:-1]
            else:
                model.tensors[name] = np.delete(model.tensors[name], 0, axis)
            with pytest.raises(ModelFileError) as refusal:
                load(model.write(path), pool)
            assert name in str(refusal.value)


def test_a_quantised_vector_is_refused(path, pool):
    model = TinyModel()
    model.tensors["blk.1.ffn_norm.weight"] = gguf.quants.quantize(np.ones((1, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_norm\.weight: a vector of type Q8_0"):
        load(model.write(path), pool)


DAMAGE = [
    ("embedding_length", None, "must be an integer"),
    ("embedding_length", 0, "must be an integer"),
    ("embedding_length", "64", "must be an integer"),
    ("embedding_length", 64.0, "must be an integer"),
    ("embedding_length", True, "must be an integer"),
    ("embedding_length", -64, "must be an integer"),
    ("embedding_length", [64, 64], "must be an integer"),
    ("embedding_length", 1 << 30, "must be an integer"),
    ("embedding_length", 32, "token_embd.weight is 97 x 64"),
    ("feed_forward_length", None, "must be an integer"),
    ("feed_forward_length", [96, 96, 96], "must be an integer"),
    ("feed_forward_length", 95, "ffn_gate.weight is 96 x 64"),
    ("block_count", None, "must be an integer"),
    ("block_count", 4, "tensor 'blk.3.attn_norm.weight' is missing|tensor 'blk.3.attn_q.weight' is missing"),
    ("block_count", 100000, "must be an integer"),
    ("context_length", None, "must be an integer"),
    ("context_length", 1 << 30, "must be an integer"),
    ("attention.head_count", None, "must be an integer"),
    ("attention.head_count", 3, "3 query heads cannot share 2 key heads"),
    ("attention.head_count", 8, "attn_q.weight is 128 x 64"),
    ("attention.head_count_kv", 4, "attn_k.weight is 64 x 64"),
    ("attention.head_count_kv", [2, 2, 2], "must be an integer"),
    ("attention.key_length", 24, "head width 24 is not a multiple of 16"),
    ("attention.key_length", 1024, "must be an integer"),
    ("attention.value_length", 64, "keys and values of different widths"),
    ("attention.layer_norm_rms_epsilon", None, "must be a positive number"),
    ("attention.layer_norm_rms_epsilon", 0.0, "must be a positive number"),
    ("attention.layer_norm_rms_epsilon", float("nan"), "must be a positive number"),
    ("attention.layer_norm_rms_epsilon", [1e-5, 1e-5], "must be a positive number"),
    ("rope.freq_base", -1.0, "must be a positive number"),
    ("rope.freq_base", float("inf"), "must be a positive number"),
    ("rope.dimension_count", 16, "partial rotary embedding"),
    ("rope.scaling.type", "yarn", "which is not supported"),
    ("rope.scaling.type", ["linear", "none"], "which is not supported"),
    ("rope.scaling.type", "linear", "factor is None"),
    ("expert_count", 8, "which is not supported"),
    ("attention.sliding_window", "wide", "must be an integer"),
]


@every_architecture
@pytest.mark.parametrize(("key", "value", "message"), DAMAGE, ids=[f"{key}={value}" for key, value, _ in DAMAGE])
def test_a_damaged_field_is_named(path, pool, architecture, key, value, message):
    TinyModel(architecture, metadata={key: value}).write(path)
    with pytest.raises(ModelFileError, match=message) as refusal:
        load(path, pool)
    assert refusal.value.param is not None


def test_defaults_of_absent_fields(path, pool):
    """Key heads as many as query heads, the width of a head hidden / heads, rotary base 10,000."""
    model = TinyModel(hidden=64, heads=4, kv_heads=4, head_dim=16)
    full = logits(model.write(path), [1, 2, 3])
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    model.metadata |= dict.fromkeys(absent)
    np.testing.assert_array_equal(logits(model.write(path), [1, 2, 3]), full)


def test_linear_scaling_divides_positions(path):
    model = TinyModel(metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    scaled = load(model.write(path), Pool(1)).config.ropes[0]
    plain = load(TinyModel().write(path), Pool(1)).config.ropes[0]
    np.testing.assert_allclose(scaled * 4, plain)


@pytest.mark.parametrize("factors", [[1.0] * 15, [0.0] * 16, [-1.0] * 16, [float("nan")] * 16])
def test_impossible_rotary_factors_are_refused(path, pool, factors):
    model = TinyModel()
    model.tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight must hold 16 positive numbers"):
        load(model.write(path), pool)


def test_rotary_factors_divide_the_frequencies(path, pool):
    model, factors = TinyModel(), np.linspace(1, 8, 16).astype(np.float32)
    plain = load(model.write(path), pool).config.ropes[0]
    model.tensors["rope_freqs.weight"] = factors
    np.testing.assert_allclose(load(model.write(path), pool).config.ropes[0] * factors, plain, rtol=1e-12)


def test_gemma_layers_are_local_but_every_sixth(path, pool):
    config = load(TinyModel("gemma3", layers=13).write(path), pool).config
    assert [layer.window for layer in config.layers] == [None if (i + 1) % 6 == 0 else 24 for i in range(13)]
    assert [layer.rope for layer in config.layers] == [int((i + 1) % 6 == 0) for i in range(13)]


HF_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 33,
}
HF_DAMAGE = [
    ({"attention_bias": True}, "attention_bias is True"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"hidden_size": [64]}, "hidden_size"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "original_max_position_embeddings"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types"),
    ({"sliding_window": 8, "layer_types": 7}, "layer_types"),
    ({"model_type": "rwkv"}, "'rwkv' is not known"),
    ({"model_type": None}, "is not known"),
]


@pytest.mark.parametrize(("damage", "message"), HF_DAMAGE, ids=[str(damage) for damage, _ in HF_DAMAGE])
def test_a_damaged_config_json_is_refused(tmp_path, pool, damage, message):
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [33, 64], "data_offsets": [0, 33 * 64 * 4]}}).encode()
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | damage))
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(33 * 64 * 4))
    with pytest.raises(ModelFileError, match=message):
        load(tmp_path, pool)
