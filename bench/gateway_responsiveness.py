"""How long /health takes while the server computes, tokenises a long prompt, and renders a long conversation.

    python bench/gateway_responsiveness.py URL MODEL [--key KEY]

Needs a running `tokenmill serve`. Prints the median, the 99th percentile and the longest answer in milliseconds for
each load, beside the same of the idle server, and ends with status 1 if one was longer than the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable

import httpx

LIMIT_MS = 50.0
PERIOD = 0.005
Load = Callable[[httpx.AsyncClient], Awaitable[object]]


class Prober:
    """Asks for /health again and again over one connection, and keeps how long each answer took, in milliseconds."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.times: list[float] = []

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as http:
            while True:
                start = time.perf_counter()
                (await http.get("/health")).raise_for_status()
                self.times.append(1000 * (time.perf_counter() - start))
                await asyncio.sleep(PERIOD)


async def measure(options: argparse.Namespace, name: str) -> list[float]:
    """Answer times, sorted, while a process of its own puts the load on the server."""
    prober = Prober(options.url)
    probing = asyncio.create_task(prober.run())
    command = [sys.executable, __file__, options.url, options.model, "--key", options.key, "--put", name]
    load = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert load.stdout is not None
    await load.stdout.readline()
    prober.times.clear()
    if await load.wait():
        raise SystemExit(f"the load {name!r} failed")
    probing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await probing
    return sorted(prober.times)


async def put(options: argparse.Namespace) -> None:
    """Put one load on the server, having said so."""
    headers = {"authorization": f"Bearer {options.key}"}
    async with httpx.AsyncClient(base_url=options.url, timeout=600, headers=headers) as http:
        print("begun", flush=True)
        await loads(options.model)[options.put](http)


def loads(model: str) -> dict[str, Load]:
    text = "The quick brown fox jumps over the lazy dog; <|im_end|> 0123456789 naïve café. " * 12_500

    async def idle(http: httpx.AsyncClient) -> object:
        return await asyncio.sleep(2)

    async def tokenise(http: httpx.AsyncClient) -> object:
        return await asyncio.gather(*(http.post("/tokenize", json={"model": model, "prompt": text}) for _ in range(4)))

    async def converse(http: httpx.AsyncClient) -> object:
        messages = [{"role": "user", "content": text[:1000]}, {"role": "assistant", "content": text[:1000]}] * 500
        return await http.post("/tokenize", json={"model": model, "messages": messages})

    async def decode(http: httpx.AsyncClient) -> object:
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 128, "ignore_eos": True, "stream": True}
        return await asyncio.gather(*(http.post("/v1/completions", json=body | {"seed": seed}) for seed in range(16)))

    async def prefill(http: httpx.AsyncClient) -> object:
        body = {"model": model, "prompt": text[:3000], "max_tokens": 1}
        return await asyncio.gather(*(http.post("/v1/completions", json=body | {"prompt": f"{i} {body['prompt']}"}) for i in range(8)))

    return {"idle": idle, "4 x 1 MB tokenised": tokenise, "1 MB conversation": converse, "16 streams": decode, "8 prefills": prefill}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--key", default="none")
    parser.add_argument("--put", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.put:
        asyncio.run(put(options))
        return 0
    slow = False
    print(f"{'load':<20} {'probes':>7} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}  limit {LIMIT_MS:g} ms")
    for name in loads(options.model):
        times = asyncio.run(measure(options, name))
        middle, late = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
        slow |= times[-1] > LIMIT_MS
        print(f"{name:<20} {len(times):>7} {middle:>8.1f} {late:>8.1f} {times[-1]:>8.1f}  {'ok' if times[-1] <= LIMIT_MS else 'TOO SLOW'}")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
