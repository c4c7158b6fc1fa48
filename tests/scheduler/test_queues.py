"""The order of service."""

import random

import pytest

from tokenmill.core.types import SamplingParams
from tokenmill.scheduler.queues import SequenceQueue
from tokenmill.scheduler.sequence import Sequence


def sequence(request_id: str, priority: int = 1, arrival: float = 0.0, choice: int = 0) -> Sequence:
    return Sequence(request_id, choice, [1], SamplingParams(max_tokens=1), 0, priority, arrival)


def test_priority_then_arrival_then_request_then_choice() -> None:
    queue = SequenceQueue()
    wanted = [
        sequence("z", 0, 9.0),
        sequence("b", 1, 1.0),
        sequence("a", 1, 2.0, choice=0),
        sequence("a", 1, 2.0, choice=1),
        sequence("b", 1, 2.0, choice=0),
        sequence("a", 2, 0.0),
    ]
    for item in reversed(wanted):
        queue.push(item)
    assert list(queue) == wanted


@pytest.mark.parametrize("seed", range(10))
def test_random_pushes_and_removals_stay_sorted(seed: int) -> None:
    rng = random.Random(seed)
    queue, twin = SequenceQueue(), list[Sequence]()
    for number in range(300):
        if twin and rng.random() < 0.4:
            gone = twin.pop(rng.randrange(len(twin)))
            queue.remove(gone)
        else:
            twin.append(sequence(f"r{number}", rng.randrange(3), rng.randrange(4)))
            queue.push(twin[-1])
        assert list(queue) == sorted(twin, key=lambda s: s.rank), f"seed {seed}"
        assert len(queue) == len(twin)


def test_removing_what_is_not_queued_is_our_own_fault() -> None:
    queue = SequenceQueue()
    queue.push(sequence("a"))
    for stranger in (sequence("a"), sequence("b"), sequence("A")):
        with pytest.raises(AssertionError, match="not queued"):
            queue.remove(stranger)
