"""What is said crosses a stream and is the same again."""

from __future__ import annotations

import msgspec
import pytest
from handover_samples import NONCE, RELEASE, generate, prefill, ready, reserve, start, taken

from tokenmill.core.errors import Unavailable
from tokenmill.core.handover import FromWorker, Refused, Reserved, ToWorker, frames_of_chunk, token_hash, tokens_of
from tokenmill.core.messages import Failed, Generate, SequenceOutput, StepOutput

TO_WORKER = [generate(output=[1, 2]), reserve(), prefill(), ready(0), taken(0), Refused("r", 1, NONCE, "corrupt"), start(7), RELEASE]
OUTPUT = StepOutput([SequenceOutput("r", 0, [7], epoch=3, index=5)])
FROM_WORKER = [
    Reserved("r", 1, NONCE, 8),
    ready(1),
    taken(1),
    Refused("r", 1, NONCE, "nonce"),
    Failed.of(Unavailable("no"), "r", 4),
    OUTPUT,
]


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda message: type(message).__name__)
def test_a_worker_reads_what_the_gateway_says(message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToWorker) == message


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda message: type(message).__name__)
def test_the_gateway_reads_what_a_worker_says(message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromWorker) == message


def test_tokens_are_the_prompt_and_what_has_been_put_out() -> None:
    assert tokens_of(generate(prompt=[1, 2], output=[3])) == [1, 2, 3]
    assert tokens_of(generate(prompt=[1, 2])) == [1, 2]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(generate()), type=Generate).output == {}


def test_hashes_tell_tokens_apart() -> None:
    texts = [[], [0], [0, 0], [1], [256], [0, 1], [1, 0], list(range(8)), list(range(9))]
    assert len({token_hash(tokens) for tokens in texts}) == len(texts)


@pytest.mark.parametrize(
    ("start", "stop", "window", "frames"),
    [(0, 64, None, 8), (0, 64, 16, 2), (0, 64, 17, 2), (0, 64, 18, 3), (56, 64, 18, 1), (0, 64, 1, 0), (0, 64, 4096, 8), (16, 64, 512, 6)],
)
def test_a_window_needs_the_frames_that_the_next_row_sees(start: int, stop: int, window: int | None, frames: int) -> None:
    assert frames_of_chunk(start, stop, window) == frames


def test_after_any_chunks_a_window_is_whole() -> None:
    """What the row after a chunk sees has come with that chunk or the ones before it."""
    for window in (1, 8, 9, 24, 30):
        for stops in ((8, 16, 24, 32, 40), (8, 40), (24, 32, 40), (40,)):
            brought: set[int] = set()
            for begin, stop in zip((0, *stops), stops, strict=False):
                brought |= set(range(stop - 8 * frames_of_chunk(begin, stop, window), stop))
                assert set(range(max(0, stop - window + 1), stop)) <= brought
