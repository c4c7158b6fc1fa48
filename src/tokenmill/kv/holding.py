"""What one sequence holds, and how it lets go of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenmill.core.types import FRAME, Streaming
from tokenmill.kv.groups import KVGroup, Retention, Whole, Window
from tokenmill.kv.prefix_cache import Rule
from tokenmill.kv.prefix_tree import Node
from tokenmill.kv.table import PageTable


@dataclass(slots=True)
class Holding:
    """What one sequence holds.

    tables: one per group. keys: of its shared positions, in the prefix tree up to the end of `node`; the leading group's own table,
    where there is one. covered: frames of positions that every group has room for. slides: per group, whether it gives back what
    falls out of sight. promise: frames that nobody else gets until it has `goal` tokens; with those present, never above `ceiling`.
    """

    tables: tuple[PageTable, ...]
    keys: PageTable
    node: Node
    shared: int
    covered: int
    slides: tuple[bool, ...]
    computed: int
    sparse: bool = False
    promise: int = 0
    ceiling: int = 0
    goal: int = 0

    @property
    def present(self) -> int:
        """Frames in all tables."""
        return sum(table.present for table in self.tables)

    @property
    def private(self) -> int:
        """Frames in all tables that are the sequence's own."""
        runs = (run for table in self.tables for run in table.held(min(self.shared, table.n_frames), table.n_frames))
        return sum(stop - start for start, stop in runs)

    def lacks(self, goal: int, step: int) -> list[int]:
        """Frames that each table lacks to have `goal` frames of positions, or `step` where it slides."""
        if step == goal:
            return [goal - table.n_frames if goal > table.n_frames else 0 for table in self.tables]
        return [max((step if slides else goal) - table.n_frames, 0) for table, slides in zip(self.tables, self.slides, strict=True)]


class Follower(NamedTuple):
    """A retention rule whose groups (their numbers) follow the keys of the prefix tree."""

    retention: Retention
    groups: tuple[int, ...]

    @property
    def rule(self) -> Rule:
        """What the prefix cache has to know of it."""
        return Rule(len(self.groups), (self.retention.tokens + 6) // FRAME if isinstance(self.retention, Window) else None)

    @property
    def sinks(self) -> int:
        """Frames at the beginning that never fall out of sight."""
        return self.retention.sinks // FRAME if isinstance(self.retention, Streaming) else 0

    def low(self, computed: int) -> int:
        """The first frame of positions that a row at `computed` looks at, apart from sinks, once the rule slides."""
        assert not isinstance(self.retention, Whole), "a group that keeps everything does not slide"
        reach = self.retention.tokens if isinstance(self.retention, Window) else self.retention.recent
        return max(self.sinks, (computed + 1 - reach) // FRAME)

    def shared(self, holding: Holding) -> Iterator[list[int]]:
        """The keys of the shared frames that a sequence has of this rule, by runs."""
        for start, stop in holding.tables[self.groups[0]].held(0, holding.shared):
            yield holding.keys.frames(start, stop)


def find_followers(groups: Sequence[KVGroup], lead: int | None) -> list[Follower]:
    """The rules of all groups but the leading one."""
    rules: dict[Retention, list[int]] = {}
    for number, group in enumerate(groups):
        if number != lead:
            rules.setdefault(group.retention, []).append(number)
    return [Follower(rule, tuple(numbers)) for rule, numbers in rules.items()]
