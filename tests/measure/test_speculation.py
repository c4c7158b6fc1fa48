"""The speculation benchmark's arithmetic on steps that are made up, its prompts, and what it does about an answer that changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError, TokenmillError
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.loading import load_model
from tokenmill.engine.speculation import Drafter
from tokenmill.measure.plot import draw
from tokenmill.measure.report import Row
from tokenmill.measure.speculation.limits import limit_rows
from tokenmill.measure.speculation.prompts import MOST, WORKLOADS, parse_workloads
from tokenmill.measure.speculation.runs import Case, FreeRows, Method, Step, Turn, Verified, measure_case
from tokenmill.measure.speculation.tables import case_rows, charts, position_rows, speculation_table
from tokenmill.measure.speculation.theory import Costs, allowed, predicted, speedup
from tokenmill.speculate.costs import StepCosts
from tokenmill.speculate.lengths import choose_lengths
from tokenmill.speculate.speculator import MARGIN

FLAT = Costs(0.0, (1, 100), (1.0, 1.0))
PROPORTIONAL = Costs(0.0, (1, 100), (1.0, 100.0))


def step(*streams: tuple[int, int], started: float = 0.0, computed: float = 1.0) -> Step:
    """streams: tokens drafted, each at odds of 0.9, and tokens that came out."""
    return Step(started, computed, {number: Verified((0.9,) * drafted, new) for number, (drafted, new) in enumerate(streams)})


def turn(*groups: Sequence[Step]) -> Turn:
    return Turn([[1]], [list(group) for group in groups])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_prompts_of_a_workload_differ_and_are_always_the_same(workload: str) -> None:
    prompts = [WORKLOADS[workload].prompt(number) for number in range(MOST)]
    assert len(set(prompts)) == MOST
    assert prompts == [WORKLOADS[workload].prompt(number) for number in range(MOST)]


def test_a_file_to_edit_has_the_name_that_is_to_be_changed() -> None:
    for number in range(MOST):
        file, _, asked = WORKLOADS["edit"].prompt(number).rpartition("```")
        name = asked.split("`")[1]
        assert file.count(name) >= 1
        assert f"{name}_renamed" in asked
        assert 140 <= len(file.splitlines()) <= 152


def test_workloads_are_chosen_by_name() -> None:
    assert parse_workloads("chat, edit,chat") == ["chat", "edit"]
    with pytest.raises(ConfigError, match="there is no 'x'"):
        parse_workloads("chat,x")


def test_a_cost_curve_is_of_medians_and_takes_rare_numbers_of_rows_together() -> None:
    often = [step((0, 1), computed=seconds) for seconds in (1, 1, 1, 1, 9)]
    rare = [step((rows - 1, 1), computed=2.0) for rows in (3, 3, 5, 5, 5)]
    last = [step((8, 1), computed=4.0)]
    costs = Costs.of([step((0, 1), started=0.5)], [*last, *rare, *often])
    assert (costs.rows, costs.computed) == ((1, 4.2, 9), (1, 2.0, 4.0))
    assert costs.seconds(1) == 1.5
    assert costs.seconds(6.6) == pytest.approx(3.5)


def test_theory_takes_the_proposer_as_measured_and_steps_by_their_rows() -> None:
    costs = Costs(0.1, (1, 5), (1.0, 3.0))
    steps = turn([step((0, 1), started=0.1, computed=77), step((4, 5), started=0.3, computed=77)])
    assert predicted(steps, costs) == pytest.approx((0.1 + 1.0) + (0.3 + 3.0))
    assert costs.proposing(steps) == pytest.approx(0.1)


def test_what_is_allowed_is_the_best_threshold() -> None:
    right = turn([step((4, 5))] * 10)
    assert allowed(right, FLAT) == pytest.approx(5)
    assert allowed(right, PROPORTIONAL) == pytest.approx(1)
    # Two of four tokens are right: without further costs to verify four is as good as two, with some two are best.
    half = turn([step((4, 3))] * 10)
    assert allowed(half, FLAT) == pytest.approx(3)
    sloped = Costs(0.0, (1, 100), (1.0, 1 + 0.1 * 99))
    assert allowed(half, sloped) == pytest.approx(3 / 1.2)


def test_what_is_allowed_knows_likely_drafts_from_unlikely_ones() -> None:
    costs = Costs(0.0, (1, 100), (1.0, 1 + 0.5 * 99))
    good, bad = Step(0.0, 1.0, {0: Verified((0.9, 0.9), 3)}), Step(0.0, 1.0, {0: Verified((0.3, 0.3), 1)})
    # 40 tokens: half of the steps verify two and give three, half of them give one; on average two, with two rows.
    assert allowed(turn([good, bad] * 10), costs) == pytest.approx(2 / 1.5)
    assert allowed(turn([bad] * 10), costs) == 1


def test_what_is_allowed_counts_the_proposers_time_and_each_streams_pace() -> None:
    slow = turn([step((4, 5), started=1.0)] * 10)
    assert allowed(slow, FLAT) == pytest.approx(5 / 2)
    # One stream gets 5 tokens in a step, the other one: six instead of two.
    uneven = turn([step((4, 5), (0, 1))] * 2)
    assert allowed(uneven, FLAT) == pytest.approx(3)
    assert allowed(uneven, PROPORTIONAL) == pytest.approx(1)
    apart = turn([step((4, 5))] * 2, [step((0, 1))] * 10)
    assert allowed(apart, FLAT) == pytest.approx(20 / 12)


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1.0), (0.5, 1.9375), (1.0, 5.0)])
def test_the_curve_is_that_of_independent_tokens(rate: float, expected: float) -> None:
    assert speedup(rate, 1, 4, FLAT) == pytest.approx(expected)
    assert speedup(rate, 1, 4, PROPORTIONAL) == pytest.approx(1)
    assert speedup(rate, 1, 4, FLAT, token_seconds=10) == 1


def made_up() -> Case:
    plain = [turn([step((0, 1), computed=seconds)] * 10) for seconds in (1, 2, 1)]
    drafted = [turn([step((4, 5), computed=seconds)] * 2) for seconds in (1.25, 2.5, 5)]
    return Case("edit", 1, {"none": plain[0], "suffix": drafted[0]}, {"none": plain, "suffix": drafted})


def test_rows_of_a_case_are_medians_over_rounds() -> None:
    plain, suffix = case_rows(made_up())
    assert (plain["tokens_per_second"], plain["speedup"], plain["drafted"]) == (1.0, None, None)
    assert suffix["speedup"] == pytest.approx(4), "of 4, 4 and 1"
    assert (suffix["drafts"], suffix["drafted"], suffix["accepted"], suffix["acceptance"]) == (6, 24, 24, 1.0)
    assert suffix["per_verified_step"] == 5
    assert suffix["tokens"] == 30
    (positions,) = position_rows(made_up())
    assert (positions["method"], positions["drafts"]) == ("suffix", 6)
    assert [positions.get(str(at)) for at in range(6)] == [None, 1, 1, 1, 1, None]


def test_the_chart_has_a_point_of_each_workload(tmp_path: Path) -> None:
    table = speculation_table()
    table.rows.extend(case_rows(made_up()))
    (chart,) = charts([made_up()], table, 4)
    theory, suffix = chart.lines
    assert (theory.dashed, suffix.joined) == (True, False)
    assert (suffix.xs, suffix.ys) == ([1.0], [pytest.approx(4)])
    draw([chart], tmp_path / "chart.png")


def row(workload: str, streams: int, method: str, speedup: float | None, share: float | None = None) -> Row:
    return {"workload": workload, "streams": streams, "method": method, "speedup": speedup, "gain_share": share}


def test_limits_are_judged_where_they_mean_something() -> None:
    rows = [
        row("edit", 1, "none", None),
        row("edit", 1, "ngram", 2.0),
        row("edit", 1, "suffix", 3.1),
        row("edit", 1, "draft", 4.0),
        row("code", 1, "suffix", 1.3),
        row("chat", 16, "suffix", 0.9, 0.6),
        row("chat", 16, "ngram", 1.0),
    ]
    found = [(limit["name"], limit["figure"], limit["verdict"]) for limit in limit_rows(rows)]
    assert found == [
        ("speed-up of edit, one stream, looked up, suffix", 3.1, "held"),
        ("speed-up at worst, edit, streams 1: ngram", 2.0, "held"),
        ("speed-up at worst, code, streams 1: suffix", 1.3, "held"),
        ("speed-up at worst, chat, streams 16: suffix", 0.9, "MISSED"),
        ("share of the gain that costs and acceptance allow, chat, suffix", 0.6, "MISSED"),
    ]


def test_a_gain_below_nothing_is_a_miss() -> None:
    assert [limit["verdict"] for limit in limit_rows([row("chat", 16, "suffix", 1.0, -0.1)])] == ["held", "MISSED"]


def request(tokens: Sequence[int], length: int) -> Generate:
    return Generate(request_id="0", prompt=list(tokens), params=SamplingParams(temperature=0, seed=0, max_tokens=length))


def test_rows_that_cost_nothing_have_drafts_as_long_as_they_can_be_while_real_costs_are_learned() -> None:
    known = StepCosts()
    free = FreeRows(known, 18)
    assert not free.known
    free.observe(1, 1.0)
    free.observe(8, 8.0)
    assert (known.seconds(1), known.seconds(8)) == (1, 8)
    assert free.seconds(1) == free.seconds(100) > known.seconds(18)
    unlikely = [(0.1, 0.1), (), (0.03,)]
    assert choose_lengths(unlikely, 3, known.seconds, MARGIN) == [0, 0, 0]
    assert choose_lengths(unlikely, 3, free.seconds) == [2, 0, 1]


def test_a_probe_has_drafts_as_long_as_they_can_be_and_leaves_the_costs_as_learned(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that drafts for itself, with weights that are a little other: nearly always right, and never worth it once that is known."""
    monkeypatch.setattr(Drafter, "share", 0.2)
    drafts = {"model": str(smollm2_path), "num_speculative_tokens": 4}
    config = EngineConfig.from_settings(model=str(smollm2_path), threads=1, max_model_len=64, max_batch_size=1, speculative_config=drafts)
    method = Method("draft", config, load_model(config))
    try:
        method.probe([request(range(9, 20), 18)], Turn())  # what a draft costs is known afterwards
        probe = Turn()
        method.probe([request(range(19, 30), 18)], probe)
        left = 17
        for step in probe.steps:
            assert step.drafted == min(4, left - 1)
            left -= step.streams[0].new
        assert left == 0
        assert sum(step.drafted for step in probe.steps) > 8
        assert type(method.costs) is StepCosts
        assert method.costs.known
    finally:
        method.close()


def test_a_method_that_changes_an_answer_is_an_error(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_settings(model=str(smollm2_path), threads=1, max_model_len=64, max_batch_size=1)
    loaded = load_model(config)
    method = Method("none", config, loaded)
    other = Method("suffix", config, loaded)
    said: list[str] = []
    try:
        case = measure_case({"none": method, "suffix": other}, "chat", 1, [request(range(9, 20), 6)], 1, said.append)
        assert [len(turn.answers[0]) for turn in (*case.probes.values(), *case.turns["none"], *case.turns["suffix"])] == [6] * 4
        assert [len(turn.steps) for turn in case.probes.values()] == [5, 5], "the first token is not of decoding"
        assert len(said) == 2
        take = other.take

        def wrong(group: Sequence[Generate], turn: Turn) -> None:
            take(group, turn)
            turn.answers[0][3] += 1

        monkeypatch.setattr(other, "take", wrong)
        with pytest.raises(TokenmillError, match=r"suffix changed an answer: chat, 1 streams, prompt 0: from token 3 on it is \["):
            measure_case({"none": method, "suffix": other}, "chat", 1, [request(range(9, 20), 6)], 1, said.append)
    finally:
        method.close()
        other.close()
