"""Tiny random models saved by transformers: our log-probabilities against its float32 ones, for every architecture.

Needs `pip install torch transformers`; run with `pytest -m peer tests/models`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.models.loader import load

# the warnings of other packages are not ours to fix
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

VOCAB = 499
LENGTHS = (40, 600)
MEAN, WORST = 0.025, 0.4
"""Nats allowed on average and for any one token, for bf16 attention operands (twice what is seen)."""

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": ("Llama", COMMON | {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", COMMON | {"sliding_window": 48}),
    # without head_dim, which its config does not know: 256 / 4
    "qwen2": ("Qwen2", {k: v for k, v in COMMON.items() if k != "head_dim"} | {"hidden_size": 256}),
    "qwen3": ("Qwen3", COMMON),
    "gemma3": (
        "Gemma3",
        COMMON | {"sliding_window": 32, "query_pre_attn_scalar": 48, "num_hidden_layers": 4, "layer_types": GEMMA_LAYERS},
    ),
}
KINDS = [(family, tied, dtype) for family in FAMILIES for tied, dtype in ((False, "float32"), (True, "bfloat16"))]


def randomise(model, gemma, generator):
    """Weights under which every part of the model matters: spread-out logits, norms and biases far from trivial."""
    import torch

    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in name:
            value = noise * 0.2 + (0.0 if gemma else 1.0)
        elif "bias" in name:
            value = noise
        elif "embed" in name:
            value = noise * p.shape[1] ** -0.5
        else:
            value = noise * 1.5 * p.shape[1] ** -0.5
        with torch.no_grad():
            p.copy_(value)


def save_model(family, tied, dtype, folder):
    """Save a tiny model; returns (token ids, log-probabilities [n, vocab]) by length, computed in float32."""
    import torch
    import transformers

    name, settings = FAMILIES[family]
    gemma = family == "gemma3"
    config_class = getattr(transformers, f"{name}TextConfig" if gemma else f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    generator = torch.Generator().manual_seed(17)
    model = model_class(config_class(**settings, tie_word_embeddings=tied))
    randomise(model, gemma, generator)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    # loaded anew: casting the model to bfloat16 also rounded its rotary frequencies and embedding scale
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    results = {}
    for n in LENGTHS:
        ids = torch.randint(3, VOCAB, (1, n), generator=generator)
        with torch.no_grad():
            logits = model(ids).logits[0].double()
        results[n] = ids[0].numpy().astype(np.int32), torch.log_softmax(logits, dim=-1).numpy()
    return results


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def saved(request, tmp_path_factory):
    """(family, folder, results)"""
    family, tied, dtype = request.param
    folder = tmp_path_factory.mktemp(family) / "model"
    return family, folder, save_model(family, tied, dtype, folder)


def logprobs(folder, ids):
    """Ours, float64 [n, vocab]."""
    pool = Pool(2)
    model = load(folder, pool)
    n = len(ids)
    tape = Tape(model.program, model.weights, model.vectors, pool, n, n, n // 8 + 1)
    table = np.zeros(1, np.int32)
    logits = tape.run(Batch(ids, [Segment(0, n, 0, (Pages(table, table),))], np.arange(n, dtype=np.int32))).astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def test_log_probabilities_are_those_of_transformers(saved):
    _, folder, results = saved
    for ids, want in results.values():
        assert np.ptp(want) > 5, "the distribution is too flat to tell anything"
        error = np.abs(logprobs(folder, ids) - want)
        assert error.mean() < MEAN
        assert error.max() < WORST


WRONG = {
    "llama": {"rope_parameters": LLAMA3_ROPE | {"factor": 1.0}},
    "mistral": {"sliding_window": 47},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}},
    "qwen3": {"rms_norm_eps": 0.05},
    "gemma3": {"sliding_window": 33},
}


def test_a_slightly_wrong_configuration_is_noticed(saved, tmp_path):
    family, folder, results = saved
    wrong = Path(shutil.copytree(folder, tmp_path / "wrong")) / "config.json"
    wrong.write_text(json.dumps(json.loads(wrong.read_text()) | WRONG[family]))
    ids, want = results[600]
    assert np.abs(logprobs(wrong.parent, ids) - want).mean() > 4 * MEAN
