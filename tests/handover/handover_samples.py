"""Messages of one hand-over, as they should be; tests change what they are about."""

from __future__ import annotations

from tokenmill.core.handover import Prefill, Ready, Release, Reserve, Start, Taken, Ticket, token_hash
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.worker.handover.lease import Chunk, Source
from tokenmill.worker.handover.reservation import Target

PROMPT = list(range(100, 120))  # two full frames and four tokens
NONCE = b"0123456789abcdef"
SOURCE = Source(boot="boot of p", fingerprint="model", address="shm:@p")
TARGET = Target(boot="boot of d", fingerprint="model", windows=(None, 8))


def generate(epoch: int = 1, prompt: list[int] = PROMPT, output: list[int] | None = None, **params: int) -> Generate:
    settings = SamplingParams(**({"max_tokens": 5, "seed": 7} | params))  # type: ignore[arg-type]
    told = {} if output is None else {0: output}
    return Generate(request_id="r", prompt=prompt, params=settings, cache_salt="tenant", epoch=epoch, output=told)


def reserve(epoch: int = 1, expiry: float = 10.0) -> Reserve:
    return Reserve(generate(epoch), expiry)


def prefill(nonce: bytes = NONCE, start: int = 0, expiry: float = 10.0) -> Prefill:
    return Prefill(generate(), nonce, TARGET.boot, start, expiry)


def chunk(number: int) -> Chunk:
    """The frame `number` of the prompt, in frame 10 + number of the first group and 20 + number of the second."""
    return Chunk(8 * number, 8 * number + 8, ((10 + number,), (20 + number,)), b"sum %d" % number)


def ticket(number: int, nonce: bytes = NONCE) -> Ticket:
    """What P issues for `chunk(number)`."""
    made = chunk(number)
    return Ticket(
        nonce=nonce,
        request_id="r",
        epoch=1,
        prefill_boot=SOURCE.boot,
        decode_boot=TARGET.boot,
        fingerprint="model",
        tenant="tenant",
        token_hash=token_hash(PROMPT[: made.stop]),
        address=SOURCE.address,
        chunk=number,
        start=made.start,
        stop=made.stop,
        frames=made.frames,
        checksum=made.checksum,
        last=number == 1,
        expiry=10.0,
    )


def ready(number: int) -> Ready:
    return Ready(ticket(number))


def taken(number: int) -> Taken:
    return Taken("r", 1, NONCE, number)


def start(*tokens: int) -> Start:
    return Start("r", 1, tokens)


RELEASE = Release("r", 1)
