"""The result as rows and charts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from tokenmill.core.types import Speculation
from tokenmill.measure.plot import Chart, Line
from tokenmill.measure.report import Column, Row, Table
from tokenmill.measure.speculation.runs import PLAIN, Case, Step, Turn
from tokenmill.measure.speculation.theory import Costs, allowed, predicted, speedup
from tokenmill.speculate.costs import StepCosts

WORTH = 0.05
"""A gain that theory allows must be as large for its share to mean anything."""

ROWS = (*range(1, 17), 24, 32, 48, 64, 96, 128)
"""Of the table of costs, as far as there were steps of so many."""

MATTERS = 0.02
"""Of a step: a proposer that takes longer for a token has a curve of its own."""

CURVE = [share / 50 for share in range(51)]


def speculation_table() -> Table:
    columns = (
        Column("workload", "workload"),
        Column("streams", "streams"),
        Column("method", "method"),
        Column("tokens", "tokens"),
        Column("tokens_per_second", "tokens/s", 1, 1),
        Column("speedup", "speed-up", 1, 2),
        Column("drafted", "drafted"),
        Column("accepted", "accepted"),
        Column("acceptance", "rate", 1, 2),
        Column("per_verified_step", "per verified step", 1, 2),
        Column("proposing_seconds", "proposing ms", 1e-3, 2),
        Column("theory", "theory", 1, 2),
        Column("allowed", "allowed", 1, 2),
        Column("gain_share", "of gain %", 0.01),
    )
    return Table("speculation", "the same answers with drafts and without", columns)


def positions_table(most: int) -> Table:
    columns = [Column("workload", "workload"), Column("streams", "streams"), Column("method", "method"), Column("drafts", "drafts")]
    columns += [Column(str(position), str(position), 1, 2) for position in range(1, most + 1)]
    return Table("positions", "of the tokens that were verified, how many were right, by their position in the draft", columns)


def case_rows(case: Case) -> Iterator[Row]:
    """Of each method; medians over rounds."""
    costs, plain = case_costs(case), case.turns[PLAIN]
    for method, turns in case.turns.items():
        found, bound = _together(turns), allowed(case.probes[method], costs)
        gained = statistics.median(before.token_seconds / after.token_seconds for before, after in zip(plain, turns, strict=True))
        drafted, accepted = sum(found.drafted), sum(found.accepted)
        drafts = method != PLAIN
        yield {
            "workload": case.workload,
            "streams": case.streams,
            "method": method,
            "tokens": sum(turn.tokens for turn in turns),
            "tokens_per_second": statistics.median(1 / turn.token_seconds for turn in turns),
            "speedup": gained if drafts else None,
            "drafts": found.drafts if drafts else None,
            "drafted": drafted if drafts else None,
            "accepted": accepted if drafts else None,
            "acceptance": accepted / drafted if drafted else None,
            "per_verified_step": found.mean_accepted_length if drafted else None,
            "proposing_seconds": statistics.fmean(costs.proposing(turn) for turn in turns) if drafts else None,
            "theory": _token(plain, costs) / _token(turns, costs) if drafts else None,
            "allowed": bound if drafts else None,
            "gain_share": (gained - 1) / (bound - 1) if drafts and bound >= 1 + WORTH else None,
        }


def position_rows(case: Case) -> Iterator[Row]:
    """Of each method that drafted; over all rounds."""
    for method, turns in case.turns.items():
        found = _together(turns)
        if found.drafts:
            row: Row = {"workload": case.workload, "streams": case.streams, "method": method, "drafts": found.drafts}
            rates = (accepted / drafted for drafted, accepted in zip(found.drafted, found.accepted, strict=True))
            yield row | {str(position): rate for position, rate in enumerate(rates, 1)}


def costs_table(methods: Sequence[str]) -> Table:
    columns = [Column("rows", "rows"), Column("measured", "measured ms", 1e-3, 2)]
    columns += [Column(method, f"{method} ms", 1e-3, 2) for method in methods if method != PLAIN]
    return Table("costs", "a step by its rows: medians of all that were measured, and what each engine reckons with", columns)


def cost_rows(cases: Sequence[Case], known: Mapping[str, StepCosts]) -> Iterator[Row]:
    """known: by method, what it reckons with."""
    steps = [step for case in cases for step in _steps(case)]
    most = max((step.rows for step in steps), default=0)
    for rows in (rows for rows in ROWS if rows <= most):
        same = [step.computed for step in steps if step.rows == rows]
        row: Row = {"rows": rows, "measured": statistics.median(same) if same else None}
        yield row | {name: costs.seconds(rows) for name, costs in known.items() if costs.known}


def charts(cases: Sequence[Case], table: Table, most: int) -> list[Chart]:
    """For each number of streams the speed-up against acceptance, a point for each workload, and what theory says of drafts that are
    given in every step, at their best length up to `most`."""
    return [_chart([case for case in cases if case.streams == streams], table, most) for streams in dict.fromkeys(c.streams for c in cases)]


def case_costs(*cases: Case) -> Costs:
    plain = [step for case in cases for turn in case.turns[PLAIN] for step in turn.steps]
    return Costs.of(plain, [step for case in cases for step in _steps(case)])


def _chart(cases: Sequence[Case], table: Table, most: int) -> Chart:
    streams, costs = cases[0].streams, case_costs(*cases)
    lines = [Line("theory, drafts for nothing", CURVE, [speedup(rate, streams, most, costs) for rate in CURVE], dashed=True)]
    for method in (method for method in cases[0].turns if method != PLAIN):
        turns = [turn for case in cases for turn in case.turns[method]]
        token_seconds = _token_seconds(turns, streams, costs)
        if token_seconds > MATTERS * costs.seconds(streams):
            values = [speedup(rate, streams, most, costs, token_seconds) for rate in CURVE]
            lines.append(Line(f"theory, {method}", CURVE, values, dashed=True))
        rows = [row for row in table.rows if (row["streams"], row["method"]) == (streams, method) and row["acceptance"] is not None]
        lines.append(
            Line(method, [float(row["acceptance"] or 0) for row in rows], [float(row["speedup"] or 0) for row in rows], joined=False)
        )
    return Chart(f"{streams} streams", "acceptance rate", "speed-up", lines)


def _token_seconds(turns: Sequence[Turn], streams: int, costs: Costs) -> float:
    """The proposer's, for a token of each stream's draft."""
    drafted = sum(step.drafted for turn in turns for step in turn.steps)
    spent = sum(costs.proposing(turn) * len(turn.steps) for turn in turns)
    return _ratio(spent, drafted / streams)


def _together(turns: Sequence[Turn]) -> Speculation:
    found = Speculation()
    for step in (step for turn in turns for step in turn.steps):
        for verified in step.streams.values():
            if verified.drafted:
                found.add(verified.drafted, verified.new - 1)
    return found


def _steps(case: Case) -> Iterator[Step]:
    for turns in (case.probes.values(), *case.turns.values()):
        for turn in turns:
            yield from turn.steps


def _token(turns: Sequence[Turn], costs: Costs) -> float:
    """Seconds that one takes at these costs."""
    return statistics.fmean(predicted(turn, costs) / turn.tokens for turn in turns)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
