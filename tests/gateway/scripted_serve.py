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
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import TokenmillError
from tokenmill.core.roles import Role
from tokenmill.gateway.served_model import ServedModel
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
    shouting: dict[str, Any] | None = None
    """The script of a second model, `crow`, with as many workers, whose template makes capitals of what it is told."""


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


def serving(setup: Setup, config: EngineConfig, names: list[str], template: str | None, suffix: str) -> ServedModel:
    plans = [WorkerPlan(f"mixed-{number}{suffix}", Role.MIXED, config) for number in range(setup.workers)]
    cluster = Cluster(config, plans, command=scripted_engine.command(), policy=setup.policy, health=setup.health)
    return ServedModel(cluster, lambda: byte_tokenizer(template), names)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    print(url, flush=True)
    models = [serving(setup, scripted_engine.config(**setup.script), ["parrot", "polly"], setup.chat_template, "")]
    if setup.shouting is not None:
        config = msgspec.structs.replace(scripted_engine.config(**setup.shouting), served_name="crow")
        models.append(serving(setup, config, ["crow"], "{{ messages[-1].content | upper }}", "@crow"))
    service = Service(models, setup.api_key)

    def announce(model: ServedModel) -> None:
        print(f"ready {model.cluster.info.pid} {model.names[0]}", flush=True)

    asyncio.run(serve(service, sock, setup.shutdown_timeout, announce))


if __name__ == "__main__":
    try:
        main()
    except TokenmillError as error:
        sys.exit(f"tokenmill: {error}")
