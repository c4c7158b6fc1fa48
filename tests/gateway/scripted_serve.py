"""A server over the scripted engine: `tokenmill serve` without a model. One argument, the `Setup` as JSON.

Its tokens are bytes and its chat template shows only the last message, so that the model answers with what it was told.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import msgspec
import scripted_engine
from scripted_engine import EOS

from tokenmill.cluster.division import WorkerPlan
from tokenmill.cluster.health import HealthPolicy
from tokenmill.cluster.local import Cluster
from tokenmill.cluster.supervisor import RestartPolicy
from tokenmill.core.errors import TokenmillError
from tokenmill.core.messages import EngineInfo
from tokenmill.core.roles import Role
from tokenmill.gateway.server import listen, serve
from tokenmill.gateway.service import Service
from tokenmill.text.alphabet import BYTE_TO_CHAR
from tokenmill.text.definition import Definition, SpecialToken, library_json
from tokenmill.text.tokenizer import Tokenizer


class Setup(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    script: dict[str, Any] = {}
    api_key: str | None = None
    shutdown_timeout: float = 10.0
    policy: RestartPolicy = RestartPolicy(first_delay=0.01, ask_every=0.2, stalled_after=2.0, killed_after=4.0)
    workers: int = 1
    health: HealthPolicy = HealthPolicy()
    chat_template: str | None = "{{ messages[-1].content }}"


def byte_tokenizer(chat_template: str | None) -> Tokenizer:
    vocabulary = {BYTE_TO_CHAR[byte]: byte for byte in range(256)}
    pre_tokenizer = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return Tokenizer(
        Definition(
            model=library_json({"vocab": vocabulary, "merges": []}, normalizer=None, pre_tokenizer=pre_tokenizer, added=[]),
            pieces=[*(bytes([byte]) for byte in range(256)), b"<|eos|>"],
            specials=[SpecialToken("<|eos|>", EOS)],
            hidden=[EOS],
            bos_id=None,
            eos_id=EOS,
            eos_ids=[EOS],
            add_bos=False,
            add_eos=False,
            missing_bytes=b"",
            space_first=False,
            strip_space=False,
            chat_template=chat_template,
        )
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    print(url, flush=True)
    config = scripted_engine.config(**setup.script)
    plans = [WorkerPlan(f"mixed-{number}", Role.MIXED, config) for number in range(setup.workers)]
    cluster = Cluster(config, plans, command=scripted_engine.command(), policy=setup.policy, health=setup.health)
    service = Service(cluster, lambda: byte_tokenizer(setup.chat_template), ["parrot", "polly"], setup.api_key)

    def announce(info: EngineInfo) -> None:
        print(f"ready {info.pid}", flush=True)

    asyncio.run(serve(service, sock, setup.shutdown_timeout, announce))


if __name__ == "__main__":
    try:
        main()
    except TokenmillError as error:
        sys.exit(f"tokenmill: {error}")
