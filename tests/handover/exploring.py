"""Every run of a scenario, by depth-first search over its states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from handover_parts import Client, Scenario
from handover_world import Event, World


class Broken(AssertionError):
    """Something that must hold does not, and what led there."""


@dataclass
class Explored:
    """ends: in how many final states a choice ends so. noted: in how many steps something happens (`World.noted`)."""

    states: int = 0
    steps: int = 0
    longest: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return f"{self.states} states, {self.steps} steps, the longest run {self.longest}; ends: {ends}"


def explore(scenario: Scenario, most: int = 5_000_000) -> Explored:
    """Visit every state once. Raises `Broken` where an assertion fails, where a run can go round in circles (so if none can, every run
    ends, however it is scheduled), where nothing can happen but something should, and after `most` states."""
    found = Explored()
    path: list[str] = []

    def broken(why: object) -> Broken:
        lines = "\n".join(f"  {number}. {name}" for number, name in enumerate(path, 1))
        return Broken(f"{why}\n{scenario}\n{lines}")

    def enter(world: World) -> Iterator[Event]:
        events = world.events()
        if not events:
            world.check_end()
            client: Client = world.at("client")
            found.ends.update(client.ends.values())
        return iter(events + world.faults())

    root = World(scenario)
    seen, under_way = {root.key}, {root.key}
    stack = [(root, root.key, enter(root))]
    while stack:
        world, key, events = stack[-1]
        event = next(events, None)
        if event is None:
            stack.pop()
            under_way.discard(key)
            if path:
                path.pop()
            continue
        path.append(event[0])
        found.steps += 1
        try:
            after = world.after(event)
            found.noted.update(after.noted)
            reached = after.key
            assert reached not in under_way, "a run can go round in circles"
            if reached in seen:
                path.pop()
                continue
            assert len(seen) < most, f"there are more than {most} states"
            following = enter(after)
        except Exception as error:
            raise broken(f"{type(error).__name__}: {error}") from error
        seen.add(reached)
        under_way.add(reached)
        found.longest = max(found.longest, len(path))
        stack.append((after, reached, following))
    found.states = len(seen)
    return found
