"""Steps without drafts, now and then, so that it is known what such a step takes.

Drafts are weighed against a step without any. While every step has some, none of those is measured, and what is believed of them may be
of longer sequences, or of a machine that was busy: an error that would never be seen, since it is what keeps it from being seen.
"""

from __future__ import annotations

SOONEST, LATEST = 16, 256
"""Steps with drafts between two checks: twice as many each time that what was believed was right."""

ALIKE = 0.15
"""How far off a belief may be that was right."""


class Checks:
    """When the next one is due."""

    def __init__(self) -> None:
        self._since = 0
        self._patience = SOONEST

    @property
    def due(self) -> bool:
        """Whether the next step is to do without drafts."""
        return self._since >= self._patience

    def note_drafts(self) -> None:
        """There was a step with drafts."""
        self._since += 1

    def note_plain(self, believed: float, took: float) -> None:
        """There was one without, of which so many seconds were believed."""
        if self.due:
            right = abs(took - believed) <= ALIKE * believed
            self._patience = min(LATEST, 2 * self._patience) if right else SOONEST
        self._since = 0
