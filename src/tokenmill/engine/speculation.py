"""From a configuration to who drafts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.engine.cache import draft_layout
from tokenmill.engine.calibrate import find_calibration
from tokenmill.engine.loading import Loaded, load_beside
from tokenmill.kernels.layout import KVLayout
from tokenmill.kernels.native import Pool
from tokenmill.kernels.tape import Tape
from tokenmill.kv.groups import Whole
from tokenmill.kv.manager import KVManager
from tokenmill.models.loader import Model
from tokenmill.sampling.sampler import Sampler
from tokenmill.speculate.combined import Combined
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.speculate.ngram import NGramProposer
from tokenmill.speculate.proposer import Proposer
from tokenmill.speculate.speculator import Speculator
from tokenmill.speculate.suffix import SuffixProposer
from tokenmill.weights.vocabulary import load_tokenizer

EARLIER_TOKENS = 1 << 17
"""Of earlier outputs that are looked up."""

DRAFT_ROWS = 256
"""Positions with which a draft model catches up in a step."""


class Drafter(NamedTuple):
    """A draft model in memory. frame_bytes: of its keys and values, beside a frame of the target's. share: of the target's weights that
    its own are, by bytes."""

    model: Model
    layout: KVLayout
    frame_bytes: int
    share: float


def load_drafter(config: EngineConfig, target: Loaded) -> Drafter | None:
    """None if none is asked for. Raises as `load_model`, and `ConfigError` if it does not speak the target's vocabulary."""
    name = config.speculative_config.model
    if name is None:
        return None
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"speculative_config.model: there is no model file or folder {name!r}", param="speculative_config.model")
    _check_vocabulary(path, Path(config.model))
    loaded = load_beside(path, target.pool)
    if loaded.model.config.vocab != target.model.config.vocab:
        raise _other_vocabulary(path, f"{loaded.model.config.vocab} logits instead of {target.model.config.vocab}")
    layout = draft_layout(config, loaded.model.program, lambda: find_calibration(path, loaded))
    model = loaded.model.narrow(target.pool)  # a draft costs bytes, and no answer depends on it
    share = model.weight_bytes / target.model.weight_bytes
    return Drafter(model, layout, layout.frame_bytes(model.program.shape.head_dim), share)


def build_speculator(
    config: EngineConfig, drafter: Drafter | None, pool: Pool, kv: KVManager, sampler: Sampler, outputs: int
) -> Speculator | None:
    """None if nobody is to draft. outputs: rows of logits at a time."""
    chosen = config.speculative_config
    if chosen.chosen == "none":
        return None
    proposer = _proposer(config, drafter, pool, kv, sampler, outputs)
    return Speculator(proposer, chosen.num_speculative_tokens, chosen.acceptance_threshold, chosen.verify == "rejection")


def _proposer(config: EngineConfig, drafter: Drafter | None, pool: Pool, kv: KVManager, sampler: Sampler, outputs: int) -> Proposer:
    chosen = config.speculative_config
    if chosen.chosen == "ngram":
        return NGramProposer()
    if drafter is None:
        return SuffixProposer(EARLIER_TOKENS)
    model = drafter.model
    most = min(outputs, config.max_batch_size)
    tape = Tape(
        model.program,
        model.weights,
        model.vectors,
        pool,
        max_rows=DRAFT_ROWS + most,
        max_outputs=most,
        n_frames=kv.n_frames,
        layout=drafter.layout,
    )
    keeping = [number for number, group in enumerate(kv.groups) if isinstance(group.retention, Whole)]
    drafting = DraftModel(tape, kv, sampler, keeping[0] if keeping else 0, DRAFT_ROWS, most, drafter.share, chosen.verify == "rejection")
    return Combined(SuffixProposer(EARLIER_TOKENS), drafting) if chosen.chosen == "combined" else drafting


def _check_vocabulary(draft: Path, target: Path) -> None:
    at = load_tokenizer(draft).differs_from(load_tokenizer(target))
    if at is not None:
        raise _other_vocabulary(draft, f"token {at} is another")


def _other_vocabulary(draft: Path, why: str) -> ConfigError:
    return ConfigError(
        f"speculative_config.model: {draft} has another vocabulary than the model it drafts for ({why}): choose a smaller model of the "
        "same family, or method suffix",
        param="speculative_config.model",
    )
