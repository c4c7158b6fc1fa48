from __future__ import annotations

import concurrent.futures
import socket
import struct

import msgspec
import pytest

from tokenmill.core import errors
from tokenmill.core.messages import Abort, Failed, FromEngine, Generate, GetStats, SequenceOutput, StepOutput, ToEngine
from tokenmill.core.types import FinishReason, SamplingParams, TokenLogprobs
from tokenmill.worker import wire

MESSAGES = [
    Generate(
        request_id="a",
        prompt=[1, 2, 3],
        params=SamplingParams(seed=2**64 - 1, logit_bias={5: -1.5}, stop=("x",)),
        priority=0,
        cache_salt="s",
    ),
    Abort("a", 1, FinishReason.STOP),
    GetStats(),
    Generate(request_id="long", prompt=list(range(200_000)), params=SamplingParams()),
]


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def test_messages_cross_in_order_between_the_blocking_side_and_the_one_that_is_fed() -> None:
    ours, theirs = pair()
    frames, received = wire.Frames(), []
    with ours:
        with theirs, concurrent.futures.ThreadPoolExecutor(1) as other:
            sending = other.submit(lambda: [wire.send(theirs, message) for message in MESSAGES])
            while len(received) < len(MESSAGES):
                received += frames.feed(ours.recv(1000))
            sending.result()
        assert ours.recv(1) == b""
    decoder = msgspec.msgpack.Decoder(ToEngine)
    assert [decoder.decode(message) for message in received] == MESSAGES


@pytest.mark.parametrize("size", [1, 3, 7, 1 << 20])
def test_pieces_of_any_size_make_the_same_messages(size: int) -> None:
    stream = b"".join(wire.frame(message) for message in MESSAGES[:3])
    frames, received = wire.Frames(), []
    for at in range(0, len(stream), size):
        received += frames.feed(stream[at : at + size])
    assert received == [msgspec.msgpack.encode(message) for message in MESSAGES[:3]]


def test_outputs_keep_every_field_on_the_way() -> None:
    logprobs = [TokenLogprobs(7, -0.25, 0, ((7, -0.25), (8, -2.0)))]
    output = SequenceOutput("a", 3, [7], logprobs, [None, TokenLogprobs(1, -1.0, 4)], FinishReason.LENGTH, None, 16, 12.5)
    ours, theirs = pair()
    with ours, theirs:
        wire.send(ours, StepOutput([output]))
        frame = wire.receive(theirs)
    assert frame is not None
    assert msgspec.msgpack.Decoder(FromEngine).decode(frame) == StepOutput([output])


@pytest.mark.parametrize("sent", [b"\0\0", struct.pack(">I", 10) + b"short", struct.pack(">I", wire.MAX_FRAME + 1)])
def test_a_stream_that_ends_inside_a_frame_or_announces_too_much_is_broken(sent: bytes) -> None:
    ours, theirs = pair()
    with theirs:
        with ours:
            ours.sendall(sent)
        with pytest.raises(wire.BrokenStream):
            wire.receive(theirs)


def test_a_frame_that_is_too_long_is_broken_before_it_has_arrived() -> None:
    with pytest.raises(wire.BrokenStream):
        list(wire.Frames().feed(struct.pack(">I", wire.MAX_FRAME + 1)))


def tree(kind: type[errors.TokenmillError]) -> list[type[errors.TokenmillError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


@pytest.mark.parametrize("kind", tree(errors.TokenmillError))
def test_an_error_that_crosses_as_failed_is_the_same_error_again(kind: type[errors.TokenmillError]) -> None:
    back = Failed.of(kind("what was wrong", param="field"), "a").error()
    assert (type(back), back.message, back.param, back.code) == (kind, "what was wrong", "field", kind.code)


def test_a_code_of_its_own_survives_the_way() -> None:
    back = Failed.of(errors.InvalidRequest("no", code="special"), "a").error()
    assert (type(back), back.code) == (errors.InvalidRequest, "special")
