"""The KV benchmark's arithmetic, over page managers without a model."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from tokenmill.core.kv_spelling import Format
from tokenmill.core.types import KVType
from tokenmill.kernels.layout import KVFormat, KVLayout
from tokenmill.kv.budget import SparsePolicy
from tokenmill.kv.groups import KVGroup, Whole, Window
from tokenmill.measure.kv_formats import format_rows, formats_table
from tokenmill.measure.kv_limits import HIT, ONCE, limit_rows
from tokenmill.measure.kv_model import KVModel
from tokenmill.measure.kv_pages import page_rows, pages_table, steps_table
from tokenmill.measure.kv_sharing import Users, sharing_table
from tokenmill.measure.limits import limits_table
from tokenmill.measure.report import Row


def model(*groups: KVGroup) -> KVModel:
    layout = KVLayout(KVFormat(), tuple(group.pairs for group in groups), (None,) * len(groups))
    return KVModel(groups, layout, 64, len(groups), 40_000, SparsePolicy())


WHOLE = model(KVGroup("whole", Whole(), ((0, 0),)))


def test_dynamic_pages_take_few_entries_for_long_sequences_and_no_more_room_than_the_smallest_for_short_ones() -> None:
    rows = {row["policy"]: row for row in page_rows(WHOLE, 0)}
    assert [rows[policy]["grown_pages"] for policy in ("8", "16", "32", "64")] == [4096, 2048, 1024, 512]
    assert {row["prompt_entries"] for row in rows.values()} == {1}, "in a fresh pool the pages of a prompt touch"
    # 8 tokens up to 512, 16 up to 1K, 32 up to 4K, then 64: 64 + 32 + 96 + 448 pages
    assert rows["dynamic"]["grown_pages"] == pytest.approx(640, abs=2)
    assert rows["dynamic"]["prompt_pages"] == rows["64"]["prompt_pages"] == 513
    wastes = {policy: float(row["waste"] or 0) for policy, row in rows.items()}
    assert wastes["dynamic"] == wastes["8"] < wastes["16"] < wastes["32"] < wastes["64"]
    assert wastes["8"] == pytest.approx(3.5, abs=0.5)


def test_windows_are_counted_by_what_they_keep() -> None:
    rows = {row["policy"]: row for row in page_rows(model(KVGroup("whole", Whole(), ((0, 0),)), KVGroup("w", Window(512), ((1, 0),))), 0)}
    assert float(rows["8"]["grown_pages"] or 0) == pytest.approx((4096 + 65) / 2, abs=1)


@pytest.mark.parametrize(
    ("name", "group_size", "head_bytes"), [("bf16", None, 256), ("int8/int8", 64, 132), ("int8/int4", 64, 102), ("int4/int4", 32, 76)]
)
def test_formats_are_page_arithmetic(name: str, group_size: int | None, head_bytes: float) -> None:
    (row,) = [row for row in format_rows(64, 90) if (row["format"], row["group_size"]) == (name, group_size)]
    assert (row["head_bytes"], row["token_bytes"], row["ratio"]) == (head_bytes, 90 * head_bytes, 256 / head_bytes)
    assert float(row["ratio"] or 0) <= float(row["limit"] or 0)


@pytest.mark.parametrize(("key", "value"), [*product(get_args(KVType), repeat=2)])
def test_what_a_format_is_called_is_how_it_is_asked_for(key: KVType, value: KVType) -> None:
    asked = Format.parse(str(KVFormat(key, value, 96)))
    assert (asked.key, asked.value, asked.group_size) == (key, value, None if key == value == "bf16" else 96)


def limits(once: float, others_to_first: float, shared: int = 2000, own: int = 32) -> dict[str, Row]:
    sharing, formats = sharing_table(), formats_table()
    size: Row = {"shared": shared, "own": own}
    sharing.rows.append(size | {"sharing": "radix", "arrival": "one by one", "once": once, "others_to_first": others_to_first})
    formats.rows.extend(format_rows(64, 1))
    table = limits_table()
    table.rows.extend(limit_rows(sharing, pages_table(), steps_table(), formats))
    table.render()
    return {str(row["name"]): row for row in table.rows}


def test_a_limit_is_held_or_missed_on_its_own_side() -> None:
    good, bad = limits(0.95, 0.12), limits(0.85, 0.2)
    names = (f"{ONCE.name}, one by one", HIT.name)
    assert [good[name]["verdict"] for name in names] == ["held", "held"]
    assert [bad[name]["verdict"] for name in names] == ["MISSED", "MISSED"]
    assert good[HIT.name]["used"] == pytest.approx(0.8)
    assert len(good) == 3, "no figure, no limit"


@pytest.mark.parametrize(
    ("shared", "own", "once", "hit"),
    [
        (1000, 50, "MISSED", "MISSED"),
        (999, 10, "MISSED", "not judged"),
        (2000, 101, "MISSED", "not judged"),
        (80, 4, "MISSED", "not judged"),
        (79, 1, "not judged", "not judged"),
    ],
)
def test_prompts_for_which_nothing_is_promised_are_not_judged(shared: int, own: int, once: str, hit: str) -> None:
    found = limits(0.0, 0.5, shared, own)
    assert [found[name]["verdict"] for name in (f"{ONCE.name}, one by one", HIT.name)] == [once, hit]
    assert (found[HIT.name]["used"] is None) is (hit == "not judged")
    assert found[HIT.name]["figure"] == 0.5


def test_users_share_a_system_prompt_and_nothing_else() -> None:
    users = Users(4, 100, 20, seed=0)
    prompts, others = users.prompts(50_000, 1), users.prompts(50_000, 2)
    assert {len(prompt) for prompt in prompts} == {users.prompt}
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 1
    assert len({tuple(prompt[100:]) for prompt in prompts}) == 4
    assert prompts[0][:100] != others[0][:100]
    assert prompts == users.prompts(50_000, 1)


def test_a_models_cache_is_known_without_loading_it(smollm2_path: Path) -> None:
    found = KVModel.of(smollm2_path)
    assert (len(found.groups), found.head_dim, found.pairs, found.context) == (1, 64, 90, 8192)
    assert found.frame_bytes == 8 * 90 * 256
