"""`tokenmill rm`"""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.weights.catalogue import Catalogue
from tokenmill.weights.progress import format_size


def command(model: Annotated[str, typer.Argument(help="The name it was pulled by.")]) -> None:
    """Delete a model from the cache."""
    print(f"removed {model}: {format_size(Catalogue().remove(model))} freed")
