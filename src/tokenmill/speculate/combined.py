"""Looks up, and has a model draft where that promises more."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tokenmill.speculate.draft import Draft
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.speculate.proposer import Wish, Worth
from tokenmill.speculate.suffix import SuffixProposer


class Combined:
    """Decides anew for every sequence and step."""

    name = "combined"
    writes = True

    def __init__(self, lookup: SuffixProposer, model: DraftModel) -> None:
        self._lookup = lookup
        self._model = model

    @property
    def invested(self) -> float:
        return self._model.invested

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        found = self._lookup.propose(wishes, worth)
        asked = [
            wish if self._model.outlook(wish, worth) > worth.best(draft.odds).saved else wish._replace(most=0)
            for wish, draft in zip(wishes, found, strict=True)
        ]
        return [drafted if drafted.tokens else draft for drafted, draft in zip(self._model.propose(asked, worth), found, strict=True)]

    def forget(self, key: Hashable) -> None:
        self._lookup.forget(key)
        self._model.forget(key)
