"""How many frames of the pool a sequence takes, from its length alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.core.types import FRAME, Streaming
from tokenmill.kv.groups import KVGroup, Window


def frames_for(n_tokens: int) -> int:
    """Frames that hold `n_tokens` positions in one group."""
    return -(-n_tokens // FRAME)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The number of groups under each rule. windows: (tokens, groups) of each window; sinks, recent: of the streaming rule."""

    whole: int
    streaming: int
    sinks: int
    recent: int
    windows: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, groups: Sequence[KVGroup]) -> Footprint:
        windows: dict[int, int] = {}
        streams: list[Streaming] = []
        for group in groups:
            if isinstance(group.retention, Window):
                windows[group.retention.tokens] = windows.get(group.retention.tokens, 0) + 1
            elif isinstance(group.retention, Streaming):
                streams.append(group.retention)
        sinks, recent = (streams[0].sinks, streams[0].recent) if streams else (0, 0)
        whole = len(groups) - sum(windows.values()) - len(streams)
        return cls(whole, len(streams), sinks, recent, tuple(windows.items()))

    @property
    def groups(self) -> int:
        return self.whole + self.streaming + sum(groups for _, groups in self.windows)

    def kept(self, frames: int, dropped: int = 0, sparse: bool = False) -> int:
        """What a sequence with `frames` frames of positions keeps while it decodes.

        dropped: frames that each whole group has given up. sparse: streaming groups have dropped their middle.
        """
        streams = min(frames, self.sinks // FRAME + _window_frames(self.recent, 1)) if sparse else frames
        total = self.whole * (frames - dropped) + self.streaming * streams
        for tokens, groups in self.windows:
            total += groups * min(frames, _window_frames(tokens, 1))
        return total

    def taken(self, start: int, goal: int, chunk: int) -> int:
        """The most frames that a sequence holds at a time beyond those of its first `start` frames of positions on its way to
        `goal` frames, when a step computes at most `chunk` tokens of it and nothing is dropped but by windows."""
        total = (self.whole + self.streaming) * (goal - start)
        for tokens, groups in self.windows:
            total += groups * min(goal - start, _window_frames(tokens, chunk))
        return total

    def transient(self, chunk: int) -> int:
        """Frames that a step of `chunk` tokens may take in window and streaming groups beyond what `kept` counts."""
        return (self.streaming + sum(groups for _, groups in self.windows)) * ((chunk + 6) // FRAME)


def _window_frames(tokens: int, chunk: int) -> int:
    """Frames that a window touches at most while `chunk` positions are computed, wherever they begin."""
    return (tokens + chunk + 13) // FRAME
