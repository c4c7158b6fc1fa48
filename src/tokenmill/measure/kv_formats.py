"""What a position takes in each KV format: page arithmetic, nothing is run."""

from __future__ import annotations

from collections.abc import Iterator

from tokenmill.core.types import FRAME, KVType
from tokenmill.kernels.layout import BITS, KVFormat
from tokenmill.measure.plot import Bars
from tokenmill.measure.report import Column, Row, Table

FORMATS: tuple[tuple[KVType, KVType], ...] = (("int8", "int8"), ("int8", "int4"), ("int4", "int4"))
GROUP_SIZES = (32, 64, 128)


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
    yield _row("bf16", None, KVFormat(), head_dim, pairs)
    for key, value in FORMATS:
        for group_size in GROUP_SIZES:
            yield _row(f"{key}/{value}", group_size, KVFormat(key, value, group_size), head_dim, pairs)


def _row(name: str, group_size: int | None, format: KVFormat, head_dim: int, pairs: int) -> Row:
    head = format.frame_bytes(head_dim) / FRAME
    return {
        "format": name,
        "group_size": group_size,
        "head_bytes": head,
        "token_bytes": head * pairs,
        "ratio": KVFormat().frame_bytes(head_dim) / FRAME / head,
        "limit": 32 / (BITS[format.key] + BITS[format.value]),
    }


def chart(table: Table) -> Bars:
    names = [str(row["format"]) + (f" of {row['group_size']}" if row["group_size"] else "") for row in table.rows]
    return Bars("a position's keys and values", "bytes", names, {"bytes": [float(row["token_bytes"] or 0) for row in table.rows]})
