"""The prefix tree: computed frames, found again by the token ids that lead to them.

A radix tree in steps of a frame. A node is a run of frames whose tokens have no branch in between; namespaces
(salts) have separate roots. Frames enter by `extend`, are pinned by references, and leave only by `evict`. What numbers a
"frame" here is the caller's choice (kv/prefix_cache.py): the tree only needs each to be in it once.

A reference is held on the *end* of a node. Two rules follow from that and keep everything cheap:
- evicting only leaves without references protects every ancestor of a reference by itself;
- splitting a run makes a new upper node and leaves the lower one its identity, so references stay right.
A node is *live* when a reference is on it or below it, *shared* when two are; the frames of nodes that are not live are *idle*,
and all of them can be evicted, leaf by leaf.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenmill.core.types import FRAME

_ITEM = array("i").itemsize
_STEP = FRAME * _ITEM  # bytes of token ids that name one frame


def _encode(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


class Node:
    """A run of frames. Read it, but only the tree writes it.

    key: token ids of the run, 32-bit each. children: by the token ids of their first frame.
    refs: references on this node's end. uses: refs, plus 1 for each live child, or 2 where it is shared; so it is 0, 1, or more
    when there are no, one or several references on the node and below.
    last_used: the tick at which it last became idle. queued: it has an entry in the eviction queue.
    """

    __slots__ = ("children", "frames", "key", "last_used", "parent", "queued", "refs", "salt", "serial", "uses")

    def __init__(self, parent: Node | None, key: bytearray, frames: list[int], salt: str, serial: int) -> None:
        self.parent = parent
        self.key = key
        self.frames = frames
        self.salt = salt
        self.serial = serial
        self.children: dict[bytes, Node] = {}
        self.refs = 0
        self.uses = 0
        self.last_used = 0
        self.queued = False

    def common(self, data: bytes, at: int) -> int:
        """Frames of this run that agree with the token ids in `data` from byte `at` on."""
        if data.startswith(self.key, at):
            return len(self.frames)
        low, high = 0, min(len(self.frames), (len(data) - at) // _STEP)
        while low < high:
            middle = (low + high + 1) // 2
            if data.startswith(self.key[low * _STEP : middle * _STEP], at + low * _STEP):
                low = middle
            else:
                high = middle - 1
        return low


class PrefixHit(NamedTuple):
    """What is known of a prompt: its first `frames` frames of positions. `held` frames of the pool are a sequence's that goes on from
    there; `idle` of them are not referenced by anyone yet."""

    frames: int
    idle: int
    held: int


MISS = PrefixHit(0, 0, 0)


class PrefixTree:
    """See the module. n_frames: frames in the tree; n_live, n_shared: those of them that are referenced, and by several.
    tick: what became idle at a higher one was used later; each release is one."""

    def __init__(self) -> None:
        self.n_frames = 0
        self.n_live = 0
        self.n_shared = 0
        self.tick = 0
        self._roots: dict[str, Node] = {}
        self._queue: list[tuple[int, int, Node]] = []
        self._serial = 0

    @property
    def n_idle(self) -> int:
        """Frames that `evict` can give back."""
        return self.n_frames - self.n_live

    def match(self, tokens: Sequence[int], salt: str) -> PrefixHit:
        """Look up whole frames of `tokens` without touching anything."""
        found = idle = 0
        for node, common in self._walk(_encode(tokens), salt):
            found += common
            idle += 0 if node.uses else common
        return PrefixHit(found, idle, found)

    def find(self, tokens: Sequence[int], salt: str) -> tuple[list[int], int]:
        """The frames of whole frames of `tokens`, and how many from the front are live; touches nothing."""
        frames: list[int] = []
        live = 0
        for node, common in self._walk(_encode(tokens), salt):
            frames += node.frames[:common]
            live += common if node.uses else 0
        return frames, live

    def acquire(self, tokens: Sequence[int], salt: str) -> tuple[Node, list[int]]:
        """Take a reference on the longest prefix of `tokens`; return its node and the frames from position 0 on."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = self._new(None, bytearray(), [], salt)
        frames: list[int] = []
        for child, common in list(self._walk(_encode(tokens), salt)):
            node = child if common == len(child.frames) else self._split(child, common)
            frames += node.frames
        self._ref(node)
        return node, frames

    def extend(self, node: Node, tokens: Sequence[int], frames: list[int]) -> tuple[Node, list[int]]:
        """Move the caller's reference from `node` down over `tokens`, which `frames` hold.

        Returns the new node and the frames the tree keeps for these positions: where it had them before they are
        its own, and the caller's frames there stay the caller's; the others it takes over.
        """
        data = _encode(tokens)
        assert len(data) == len(frames) * _STEP > 0, f"{len(frames)} frames for {len(tokens)} tokens"
        kept: list[int] = []
        end = node
        while len(kept) < len(frames):
            at = len(kept) * _STEP
            child = end.children.get(data[at : at + _STEP])
            if child is None:
                break
            common = child.common(data, at)
            end = child if common == len(child.frames) else self._split(child, common)
            kept += end.frames
        fresh = frames[len(kept) :]
        if not fresh:
            self._move(node, end)
            return end, kept
        key = data[len(kept) * _STEP :]
        self.n_frames += len(fresh)
        if node.parent is not None and node.refs == 1 and not node.children:  # a leaf of the caller's own grows
            node.key += key
            node.frames += fresh
            self.n_live += len(fresh)
        else:
            leaf = end.children[key[:_STEP]] = self._new(end, bytearray(key), list(fresh), end.salt)
            self._move(node, leaf)
            end = leaf
        return end, kept + fresh

    def release(self, node: Node) -> None:
        """Drop a reference; what nobody references any more becomes idle, most recently used."""
        self.tick += 1
        node.refs -= 1
        assert node.refs >= 0, "a reference is dropped twice"
        at: Node | None = node
        while at is not None:
            at.uses -= 1
            if at.uses > 1:
                return
            if at.uses:
                self.n_shared -= len(at.frames)
            else:
                self.n_live -= len(at.frames)
                at.last_used = self.tick
                self._offer(at)
            at = at.parent

    def would_idle(self, node: Node) -> int:
        """Frames that dropping one reference on `node` would make idle."""
        count = 0
        at: Node | None = node
        while at is not None and at.uses == 1:
            count += len(at.frames)
            at = at.parent
        return count

    def evict(self, count: int) -> list[int]:
        """Remove `count` idle frames and return them: tails of the least recently used leaves. O(log nodes) a leaf."""
        assert count <= self.n_idle, f"{count} frames are to go, but only {self.n_idle} are idle"
        gone: list[int] = []
        while len(gone) < count:
            node = self._oldest()
            assert node is not None, "idle frames cannot be evicted"
            keep = max(0, len(node.frames) - (count - len(gone)))
            gone += node.frames[keep:]
            self.n_frames -= len(node.frames) - keep
            if keep:
                del node.frames[keep:], node.key[keep * _STEP :]
            else:
                heapq.heappop(self._queue)
                node.queued = False
                self._remove(node)
        return gone

    @property
    def oldest(self) -> int | None:
        """The tick at which what `evict` takes first became idle; None when nothing is idle."""
        node = self._oldest()
        return None if node is None else node.last_used

    def _oldest(self) -> Node | None:
        """The leaf that has been idle longest, at the head of the queue: stale entries before it are corrected."""
        while self._queue:
            tick, _, node = self._queue[0]
            if not (node.uses or node.children) and node.last_used == tick:
                return node
            heapq.heappop(self._queue)
            node.queued = False
            if not (node.uses or node.children):  # else it comes back when it is an idle leaf again
                self._offer(node)
        return None

    def _walk(self, data: bytes, salt: str) -> Iterator[tuple[Node, int]]:
        """Yield the nodes that `data` leads through and how many of their frames agree; only the last may be partial."""
        node, at = self._roots.get(salt), 0
        while node is not None and len(data) - at >= _STEP:
            node = node.children.get(data[at : at + _STEP])
            if node is not None:
                common = node.common(data, at)
                yield node, common
                if common < len(node.frames):
                    return
                at += common * _STEP

    def _new(self, parent: Node | None, key: bytearray, frames: list[int], salt: str) -> Node:
        self._serial += 1
        return Node(parent, key, frames, salt, self._serial)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run after `at` frames; return the new upper node, which the caller is about to make live."""
        parent = node.parent
        assert parent is not None, "a root has no run to cut"
        upper = self._new(parent, node.key[: at * _STEP], node.frames[:at], node.salt)
        del node.key[: at * _STEP], node.frames[:at]
        upper.uses = min(node.uses, 2)
        upper.children[bytes(node.key[:_STEP])] = node
        parent.children[bytes(upper.key[:_STEP])] = upper
        node.parent = upper
        return upper

    def _ref(self, node: Node) -> None:
        node.refs += 1
        at: Node | None = node
        while at is not None:
            at.uses += 1
            if at.uses > 2:
                return
            if at.uses == 1:
                self.n_live += len(at.frames)
            else:
                self.n_shared += len(at.frames)
            at = at.parent

    def _move(self, source: Node, target: Node) -> None:
        """Move a reference downwards, the new end first so that nothing turns idle in between."""
        self._ref(target)
        self.release(source)

    def _offer(self, node: Node) -> None:
        """Queue an idle leaf for eviction. A node has one entry at most; a stale one is corrected when it surfaces."""
        if node.children or node.queued:
            return
        if node.parent is None:
            del self._roots[node.salt]
            return
        node.queued = True
        heapq.heappush(self._queue, (node.last_used, node.serial, node))

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[bytes(leaf.key[:_STEP])]
        if not parent.uses:
            self._offer(parent)

    def nodes(self) -> Iterator[tuple[str, int, Node]]:
        """Every node below the roots as (salt, frames before it, node), parents first."""
        for salt, root in self._roots.items():
            stack = [(0, child) for child in root.children.values()]
            while stack:
                depth, node = stack.pop()
                yield salt, depth, node
                stack += [(depth + len(node.frames), child) for child in node.children.values()]

    def path(self, node: Node) -> list[int]:
        """The frames from position 0 to the end of `node`."""
        chain = []
        at: Node | None = node
        while at is not None:
            chain.append(at.frames)
            at = at.parent
        return [frame for frames in reversed(chain) for frame in frames]

    def check_integrity(self, references: Sequence[Node]) -> None:
        """Recompute every link, count and queue entry from a walk. references: one node per reference held."""
        held: dict[int, int] = {}
        for node in references:
            held[id(node)] = held.get(id(node), 0) + 1
        queued = {id(node) for _, _, node in self._queue}
        assert len(queued) == len(self._queue), "a node is queued twice"
        everything = [*self._roots.values(), *(node for _, _, node in self.nodes())]
        for node in everything:
            assert bool(node.frames) == (node.parent is not None), "a run is empty"
            assert len(node.key) == len(node.frames) * _STEP, "a run's tokens and frames disagree"
            assert node.refs == held.pop(id(node), 0), "a reference count is wrong"
            assert node.uses == node.refs + sum(min(child.uses, 2) for child in node.children.values()), "a use count is wrong"
            for key, child in node.children.items():
                assert (child.parent, child.salt, bytes(child.key[:_STEP])) == (node, node.salt, key), "a link is wrong"
            assert node.queued == (id(node) in queued), "a node's mark and the queue disagree"
            if not node.uses and not node.children:
                assert node.queued, "an idle leaf cannot be evicted"
        assert not held, "a reference is held on a node outside the tree"
        assert queued <= {id(node) for node in everything}, "a removed node is still queued"
        assert self.n_frames == sum(len(node.frames) for node in everything), "the count of frames is wrong"
        assert self.n_live == sum(len(node.frames) for node in everything if node.uses), "the count of live frames is wrong"
        assert self.n_shared == sum(len(node.frames) for node in everything if node.uses > 1), "the count of shared frames is wrong"
