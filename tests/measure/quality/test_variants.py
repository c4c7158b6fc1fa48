from __future__ import annotations

import pytest

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.kv_spelling import Format
from tokenmill.measure.quality.variants import REFERENCE, parse_variants


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", Format()),
        ("int8/int8", Format("int8", "int8")),
        ("bf16/int4", Format("bf16", "int4")),
        ("int8/int4:64", Format("int8", "int4", 64)),
        ("int8/int4:plain", Format("int8", "int4", calibrated=False)),
        ("int4/int4:32:plain", Format("int4", "int4", 32, calibrated=False)),
    ],
)
def test_a_format_is_read_as_it_is_written(text: str, expected: Format) -> None:
    assert Format.parse(text) == expected
    assert expected.name == text


@pytest.mark.parametrize(
    "text", ["", "int8", "int8/int3", "bf16/bf16", "int8/int4:", "int8/int4:0", "int8/int4:plain:64", "int8/int4:64:32", "fp8/int4"]
)
def test_what_is_no_format_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv is"):
        Format.parse(text)


def test_the_reference_has_no_settings() -> None:
    assert REFERENCE.settings == {}
    assert REFERENCE.name == "bf16"


def test_settings_are_spelt_as_the_engine_spells_them() -> None:
    compressed, sparse = parse_variants(["int8/int4:64:plain"], ["topk_heads:0.7"], 512)[1::2]
    assert compressed.settings == {
        "kv_cache_config": {
            "compression": {"enabled": True, "key_dtype": "int8", "value_dtype": "int4", "calibration_method": "none", "group_size": 64}
        }
    }
    assert sparse.settings["kv_cache_config"] == compressed.settings["kv_cache_config"] | {"per_request_budget_gb": 0.5}
    assert sparse.settings["attention_config"] == {"sparse_attention": {"enabled": True, "strategy": "topk_heads", "keep_ratio": 0.7}}


def test_every_format_is_tried_at_every_level_once_and_the_reference_is_first() -> None:
    variants = parse_variants(["int8/int8", "bf16", "int8/int8"], ["topk_heads:0.5"], 64)
    assert [v.name for v in variants] == ["bf16", "int8/int8", "bf16 topk_heads:0.5 of 64 MB", "int8/int8 topk_heads:0.5 of 64 MB"]
    assert variants[0] == REFERENCE


def test_a_level_may_begin_at_another_share_of_the_budget() -> None:
    plain, early = parse_variants([], ["topk_positions:0.5", "topk_positions:0.5@0.25"], 64)[1:]
    assert [v.name for v in (plain, early)] == ["bf16 topk_positions:0.5 of 64 MB", "bf16 topk_positions:0.5@0.25 of 64 MB"]
    assert [
        EngineConfig.from_settings(model="", **v.settings).attention_config.sparse_attention.trigger_threshold for v in (plain, early)
    ] == [
        0.9,
        0.25,
    ]


@pytest.mark.parametrize(
    ("sparse", "budget", "message"),
    [
        (["topk_heads:0.7"], None, "--sparse needs --budget-mb"),
        ([], 64.0, "--budget-mb has no part without --sparse"),
        (["topk_heads"], 64.0, "--sparse is 'topk_heads'"),
        (["topk_heads:much"], 64.0, "--sparse is 'topk_heads:much'"),
        (["none:0.7"], 64.0, "--sparse is 'none:0.7'"),
        (["topk_heads:0.7@"], 64.0, "--sparse is 'topk_heads:0.7@'"),
        (["topk_heads:0.7@0"], 64.0, "--sparse is 'topk_heads:0.7@0'"),
        (["topk_heads:0.7@1.1"], 64.0, "--sparse is 'topk_heads:0.7@1.1'"),
        (["topk_heads:0.7@nan"], 64.0, "--sparse is 'topk_heads:0.7@nan'"),
        (["topk_heads@0.7"], 64.0, "--sparse is 'topk_heads@0.7'"),
        (["topk_heads:0.7"], 0.0, "--budget-mb is 0"),
    ],
)
def test_a_level_needs_a_ratio_and_a_budget(sparse: list[str], budget: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_variants([], sparse, budget)
