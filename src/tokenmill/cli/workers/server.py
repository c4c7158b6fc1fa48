"""A running server, asked about its workers."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer

from tokenmill.core.errors import TokenmillError, Unavailable

Url = Annotated[str, typer.Option(help="Where the server is.", metavar="URL")]
Key = Annotated[str | None, typer.Option("--api-key", envvar="TOKENMILL_API_KEY", help="The server's key, if it has one.")]
Name = Annotated[str, typer.Argument(help="As `tokenmill workers list` shows it.")]

URL = "http://127.0.0.1:8000"


def ask(url: str, key: str | None, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's answer, however long it takes. Raises `TokenmillError` with what it says, `Unavailable` if it cannot be reached."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        response = httpx.request(method, url.rstrip("/") + path, json=body, headers=headers, timeout=httpx.Timeout(10, read=None))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"there is no server at {url}: {error}: start one, or name another with --url") from None
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or (response.is_error and "error" not in answer):
        raise Unavailable(f"what is at {url} is no tokenmill server: name another with --url")
    if response.is_error:
        raise TokenmillError(answer["error"]["message"])
    return answer
