from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import TinyModel

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.loading import Loaded, load_model
from tokenmill.measure.quality.likelihood import Track, log_softmax
from tokenmill.measure.quality.reading import Reader, read_beside

VOCAB = 97
TEXT = np.random.default_rng(3).integers(0, VOCAB, 200).tolist()


def config(path: Path, **settings: object) -> EngineConfig:
    return EngineConfig.from_settings(model=str(path), threads=1, max_model_len=256, max_batch_size=1, **settings)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel(vocab=VOCAB).write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def loaded(path: Path) -> Loaded:
    return load_model(config(path))


def likelihoods(path: Path, tokens: list[int]) -> list[float]:
    """What an engine tells of a prompt."""
    engine = build_engine(config(path))
    params = SamplingParams(temperature=0, seed=0, max_tokens=1, prompt_logprobs=0)
    engine.add(Generate(request_id="r", prompt=tokens, params=params))
    found: list[float] = []
    while engine.has_work:
        for output in engine.step():
            found += [p.logprob for p in output.prompt_logprobs or [] if p is not None]
    return found


def test_rows_are_those_of_the_positions_in_order(path: Path, loaded: Loaded) -> None:
    reader = Reader(config(path, chunk_size=48), loaded)
    reader.begin(TEXT)
    rows = np.concatenate([log_softmax(reader.take(n)).copy() for n in (1, 63, 64, 71)])
    reader.end()
    assert rows[np.arange(199), TEXT[1:]] == pytest.approx(likelihoods(path, TEXT), abs=1e-5)


def test_a_reader_reads_one_text_after_the_other(path: Path, loaded: Loaded) -> None:
    reader = Reader(config(path), loaded)
    for tokens in (TEXT[:100], TEXT[100:]):
        reader.begin(tokens)
        rows = log_softmax(reader.take(99))
        reader.end()
        assert rows[np.arange(99), tokens[1:]] == pytest.approx(likelihoods(path, tokens), abs=1e-5)


def test_variants_of_the_same_bits_do_not_differ_however_their_steps_are_cut(path: Path, loaded: Loaded) -> None:
    tracks: list[Track] = []
    configs = {"bf16": config(path, chunk_size=64), "a": config(path, chunk_size=24), "b": config(path, chunk_size=256)}
    told = list(read_beside(configs, loaded, {"text": [TEXT[:90], TEXT[90:]]}, tracks))
    assert told == ["text: window 1 of 2", "text: window 2 of 2"]
    assert [(track.variant, track.tokens) for track in tracks] == [("bf16", 198), ("a", 198), ("b", 198)]
    for track in tracks:
        assert not any(block.kl.any() for block in track.blocks)
        assert all(block.same.all() for block in track.blocks)
        assert [b.nll.tolist() for b in track.blocks] == [b.base.tolist() for b in track.blocks]


def test_a_variant_that_computes_something_else_is_seen(
    path: Path, loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = TinyModel(vocab=VOCAB, seed=2).write(tmp_path / "other.gguf")
    models = iter([loaded, load_model(config(other))])
    monkeypatch.setattr(
        "tokenmill.measure.quality.reading.build_engine", lambda config, _, sampler: build_engine(config, next(models), sampler)
    )
    tracks: list[Track] = []
    list(read_beside({"bf16": config(path), "other": config(other)}, loaded, {"text": [TEXT]}, tracks))
    found = np.concatenate([block.nll for block in tracks[1].blocks])
    assert found == pytest.approx([-p for p in likelihoods(other, TEXT)], abs=1e-5)
    assert np.concatenate([block.base for block in tracks[1].blocks]) == pytest.approx([-p for p in likelihoods(path, TEXT)], abs=1e-5)
    assert np.concatenate([block.kl for block in tracks[1].blocks]).min() > 0
    assert np.concatenate([block.same for block in tracks[1].blocks]).mean() < 0.5


def test_windows_of_which_something_was_given_up_are_counted(path: Path, loaded: Loaded) -> None:
    """A budget of 192 positions is nearly used by 168 of them."""
    budget = {"kv_cache_config": {"per_request_budget_gb": 192 * build_engine(config(path), loaded).info.kv_bytes_per_token / 2**30}}
    sparse = {"attention_config": {"sparse_attention": {"enabled": True, "strategy": "topk_positions"}}}
    tracks: list[Track] = []
    list(read_beside({"bf16": config(path), "sparse": config(path, **budget, **sparse)}, loaded, {"t": [TEXT, TEXT[:100], TEXT]}, tracks))
    assert [(track.variant, track.sparsified) for track in tracks] == [("bf16", 0), ("sparse", 2)]
    assert max(block.kl.max() for block in tracks[1].blocks) > 0


def test_a_text_that_the_engine_gives_up_is_an_error(path: Path, loaded: Loaded) -> None:
    reader = Reader(config(path, chunk_size=16), loaded)
    reader.begin(TEXT)
    reader.take(20)
    reader._engine.abort("text")
    with pytest.raises(InvalidRequest, match="given up before its end: 12 more positions were read, not 64"):
        reader.take(64)
