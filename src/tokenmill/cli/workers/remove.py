"""`tokenmill workers remove`"""

from __future__ import annotations

from tokenmill.cli.workers import server


def command(name: server.Name, url: server.Url = server.URL, api_key: server.Key = None) -> None:
    """End a worker for good; what it has goes elsewhere.

    It gets nothing new, others go on with what it decodes, and its prompts are handed over; then its process ends.
    """
    server.ask(url, api_key, "POST", "/v1/workers/remove", {"name": name})
    print(f"{name} has ended")
