"""`tokenmill pull`"""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.weights.catalogue import Catalogue


def command(
    model: Annotated[str, typer.Argument(help="A short name such as smollm2:135m, or hf:org/repo[:file.gguf].")],
) -> None:
    """Fetch a model into the cache and print its path.

    A download that was stopped goes on where it was. The file's SHA-256 is checked.
    """
    print(Catalogue().pull(model))
