"""`tokenmill workers migrate`"""

from __future__ import annotations

from tokenmill.cli.workers import server


def command(name: server.Name, url: server.Url = server.URL, api_key: server.Key = None) -> None:
    """Have others go on with what a worker decodes.

    They get its keys and values; no stream is interrupted, and no answer changes. The worker stays, and gets new requests.
    """
    migrated = server.ask(url, api_key, "POST", "/v1/workers/migrate", {"name": name})["migrated"]
    print(f"{migrated} requests have left {name}")
