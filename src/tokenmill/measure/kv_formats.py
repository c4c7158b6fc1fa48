"""What a position takes in each KV format: page arithmetic, nothing is run."""

from __future__ import annotations

from collections.abc import Iterator

from tokenmill.core.types import FRAME
from tokenmill.kernels.layout import KVFormat
from tokenmill.measure.plot import Bars
from tokenmill.measure.report import Column, Row, Table

FORMATS = ("int8", "int8/int4", "int4")
GROUP_SIZES = (32, 64, 128)
BITS = {"bf16": 16, "int8": 8, "int4": 4}


def formats_table() -> Table:
    columns = (
        Column("format", "format"),
        Column("group_size", "group"),
        Column("head_bytes", "bytes/head"),
        Column("token_bytes", "bytes/token"),
        Column("ratio", "smaller", 1, 2),
        Column("limit", "no scales", 1, 2),
    )
    return Table("formats", "a position in each format: keys and values of one head, of the model, and 16-bit over that", columns)


def format_rows(head_dim: int, pairs: int) -> Iterator[Row]:
    """pairs: layers times KV heads, which is what a position has without windows. A group larger than a head is one of the head.

    limit: the ratio if scales took nothing.
    """
    whole = KVFormat().frame_bytes(head_dim)
    for name in ("bf16", *FORMATS):
        for group_size in (None,) if name == "bf16" else GROUP_SIZES:
            found = KVFormat.parse(name) if group_size is None else KVFormat.parse(name, group_size)
            head = found.frame_bytes(head_dim) / FRAME
            yield {
                "format": "bf16" if name == "bf16" else f"{found.key}/{found.value}",
                "group_size": group_size,
                "head_bytes": head,
                "token_bytes": head * pairs,
                "ratio": whole / FRAME / head,
                "limit": 32 / (BITS[found.key] + BITS[found.value]),
            }


def chart(table: Table) -> Bars:
    names = [str(row["format"]) + (f" of {row['group_size']}" if row["group_size"] else "") for row in table.rows]
    return Bars("a position's keys and values", "bytes", names, {"bytes": [float(row["token_bytes"] or 0) for row in table.rows]})
