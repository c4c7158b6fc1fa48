"""What engine processes say to requests, without a dispatcher."""

from __future__ import annotations

import asyncio
import weakref

from tokenmill.core.errors import EngineDied
from tokenmill.core.handover import FromWorker
from tokenmill.core.messages import Failed, Generate, SequenceOutput, StepOutput
from tokenmill.worker.client import EngineClient


class Answers:
    """What an engine process says of requests. None: its stream has ended."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[SequenceOutput | Failed | None] = asyncio.Queue()

    def heard(self, message: FromWorker) -> None:
        if isinstance(message, StepOutput):
            for output in message.outputs:
                self.said.put_nowait(output)
        elif isinstance(message, Failed):
            self.said.put_nowait(message)

    def ended(self) -> None:
        self.said.put_nowait(None)


_LISTENING: weakref.WeakKeyDictionary[EngineClient, Answers] = weakref.WeakKeyDictionary()


async def collect(client: EngineClient, *requests: Generate) -> list[SequenceOutput]:
    """Their outputs; one call at a time. Raises the error of one that fails, `EngineDied` when the stream ends."""
    if client not in _LISTENING:
        client.attach(_LISTENING.setdefault(client, Answers()))
    answers, found = _LISTENING[client], []
    for one in requests:
        client.send(one)
    missing = sum(one.params.n for one in requests)
    while missing:
        said = await answers.said.get()
        if said is None:
            raise EngineDied("the stream has ended")
        if isinstance(said, Failed):
            raise said.error()
        found.append(said)
        missing -= said.finish_reason is not None
    return found
