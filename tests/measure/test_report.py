from __future__ import annotations

import json

import msgspec

from tokenmill import __version__
from tokenmill.measure.machine import Machine, largest_cache
from tokenmill.measure.report import Ceilings, Column, Report, Table


def test_a_table_aligns_words_left_and_numbers_right_in_their_units() -> None:
    columns = (Column("op", "op"), Column("seconds", "ms", 1e-3, 1), Column("count", "n"))
    table = Table("t", "a title", columns, [{"op": "x", "seconds": 0.0125, "count": 3}, {"op": "long", "seconds": 1.0, "count": None}])
    assert table.render() == "a title\nop        ms  n\nx       12.5  3\nlong  1000.0  -"


def test_a_report_holds_the_facts_and_can_be_read_back() -> None:
    report = Report.begin("kernels", ["tokenmill", "bench"], {"seed": 1, "rows": [1, 4]})
    report.ceilings = Ceilings(33e9, 935e9, 467e9)
    report.kernels, report.threads, report.cpus = "avx512", 2, "0,3"
    report.tables = {"t": [{"op": "x", "seconds": 0.5, "floor": None}]}
    data = msgspec.json.encode(report)
    assert msgspec.json.decode(data, type=Report) == report
    raw = json.loads(data)
    assert raw["version"] == __version__
    assert raw["machine"]["cpus"] >= 1
    assert raw["tables"]["t"] == [{"op": "x", "seconds": 0.5, "floor": None}]
    assert "ceilings: reads 33.0 GB/s, int8 935 GOPS, bf16 467 GFLOPS" in report.heading()
    assert "2 threads on CPUs 0,3, avx512 kernels" in report.heading()


def test_the_machine_says_what_it_is() -> None:
    machine = Machine.here()
    assert machine.cpu
    assert machine.memory > 1 << 28
    assert largest_cache() >= 1 << 16
