"""`tokenmill bench pd`: what is asked, and what becomes of what was seen. Times are made up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest

from tokenmill.cli.bench.options import rates
from tokenmill.core.errors import ConfigError, TokenmillError
from tokenmill.core.messages import EngineInfo
from tokenmill.core.roles import Role
from tokenmill.measure.plot import Bars, Chart
from tokenmill.measure.report import Row
from tokenmill.measure.separation import rounds, tables
from tokenmill.measure.separation.demand import STREAM_PROMPT, Demand
from tokenmill.measure.separation.limits import limit_rows
from tokenmill.measure.separation.rounds import Rounds
from tokenmill.measure.separation.setups import Setup, parse_chunks, setups
from tokenmill.measure.separation.turns import Asked, Transfers, Turn, check_answers
from tokenmill.measure.serving import Objective, Record

DEMAND = Demand(2, stream_tokens=40, prompts=3, prompt_tokens=200, answer_tokens=8, rate=0.5, vocabulary=1000, seed=1)
OBJECTIVE = Objective(ttft=2.0, itl=0.1)


def asked(name: str, times: Sequence[float], tokens: Sequence[int] = (), long: bool = False, scheduled: float = 0.0) -> Asked:
    generate = DEMAND.long(int(name.split()[1])) if long else next(DEMAND.stream(int(name.split()[1])))
    assert generate.request_id.startswith(name)
    return Asked(generate, Record(scheduled, times=list(times), prompt_tokens=len(generate.prompt)), long, list(tokens))


def turn(*of: Asked, start: float = 0.0, until: float = 10.0, transfers: Transfers | None = None) -> Turn:
    return Turn(DEMAND, list(of), start, until, gateway_seconds=1.0, worker_seconds=5.0, transfers=transfers)


def row(setup: str, point: tuple[int, float] = (100, 1.0), **figures: float) -> Row:
    return {"prompt_tokens": point[0], "rate": point[1], "setup": setup, **figures}


def test_long_prompts_arrive_in_their_time_at_random() -> None:
    many = replace(DEMAND, prompts=4000, rate=20.0)
    times = many.arrivals()
    assert times == sorted(times) == many.arrivals()
    assert len(times) == 4000
    assert 0 <= times[0] < times[-1] <= 200
    gaps = [b - a for a, b in pairwise(times)]
    # of exponential gaps as many are longer than the mean as 1/e
    assert abs(sum(gap > 1 / 20 for gap in gaps) / len(gaps) - 0.368) < 0.03
    assert replace(many, number=1).arrivals() != times != replace(many, seed=2).arrivals()


def test_no_two_requests_of_a_demand_have_the_same_prompt() -> None:
    requests = [*DEMAND.warm_up(), *map(DEMAND.long, range(3)), *(r for c in range(2) for r in islice(DEMAND.stream(c), 3))]
    assert len({tuple(request.prompt[:8]) for request in requests}) == len({request.request_id for request in requests}) == 12
    assert replace(DEMAND, number=1).long(0).prompt != DEMAND.long(0).prompt


def test_streams_do_not_all_end_together() -> None:
    answers = [[request.params.max_tokens for request in islice(DEMAND.stream(client), 3)] for client in range(2)]
    assert answers == [[20, 40, 40], [40, 40, 40]]
    assert all(len(request.prompt) == STREAM_PROMPT for request in islice(DEMAND.stream(0), 2))


def test_only_gaps_of_streams_that_begin_in_what_counts_are_its_itl() -> None:
    stream = asked("stream 0", [0.5, 0.9, 1.0, 1.2, 9.9, 10.5, 10.6])
    long = asked("long 0", [5.0, 8.0], long=True, scheduled=4.0)
    found = tables.setup_row("s", [turn(stream, long, start=1.0)], OBJECTIVE)
    assert found["gaps"] == 3
    assert [found[key] for key in ("itl_p50", "itl_most")] == pytest.approx([0.6, 8.7])
    assert found["late"] == pytest.approx(1.0)


def test_time_in_long_gaps_is_late() -> None:
    stream = asked("stream 0", [0.0, 0.05, 0.1, 0.4])
    assert tables.setup_row("s", [turn(stream)], OBJECTIVE)["late"] == pytest.approx(0.3 / 0.4)


def test_what_counts_of_a_turn() -> None:
    stream = asked("stream 0", [0.5, 1.5, 2.5, 11.0])
    long = asked("long 0", [6.0, 6.5], long=True, scheduled=4.0)
    found = tables.setup_row("s", [turn(stream, long, start=1.0, until=11.0), turn(stream, long, start=1.0, until=11.0)], OBJECTIVE)
    assert (found["rounds"], found["prompts"], found["ttft_p50"]) == (2, 6, 2.0)
    assert found["seconds"] == 20
    assert found["output_tokens_per_second"] == 4 / 10
    assert found["tokens_per_second"] == (4 + 200) / 10  # the stream's prompt was computed before
    assert (found["worker_cpus"], found["gateway_cpus"]) == (0.5, 0.1)


def test_a_request_is_good_if_first_and_later_tokens_are_in_time() -> None:
    good = asked("long 0", [3.0, 3.1, 3.2], long=True, scheduled=1.5)
    late = asked("long 1", [3.6, 3.7, 3.8], long=True, scheduled=1.5)
    slow = asked("stream 0", [0.0, 0.05, 0.2, 0.25], scheduled=0.0)
    none_yet = asked("stream 1", [], scheduled=9.9)
    found = tables.setup_row("s", [turn(good, late, slow, none_yet)], Objective(2.0, 0.11))
    assert (found["requests"], found["good_share"]) == (3, pytest.approx(1 / 3))
    assert tables.setup_row("s", [turn(good, late, slow, none_yet)], Objective())["good_share"] == 1


def test_what_is_not_waited_for_of_a_transfer_is_hidden() -> None:
    one = turn(transfers=Transfers(2, reads=8, nbytes=4000, seconds=2.0, waited=0.5, exposed=[0.1, 0.3]))
    two = turn(transfers=Transfers(2, reads=8, nbytes=4000, seconds=2.0, waited=0.3, exposed=[0.3, 0.3]))
    found = tables.transfer_row([one, two])
    assert (found["prompts"], found["handed_over"], found["chunks"], found["bytes"]) == (6, 4, 4, 2000)
    assert (found["bytes_per_second"], found["seconds"], found["waited"]) == (2000, 1.0, 0.2)
    assert (found["hidden"], found["exposed_p50"]) == (0.8, 0.3)
    assert tables.transfer_row([turn(transfers=Transfers(0, 0, 0, 0.0, 0.0, []))])["hidden"] is None


def test_the_best_mixed_engine_is_looked_for_by_each_measure() -> None:
    rows = [
        row("separated", itl_p99=0.02, good_share=0.9),
        row("mixed 2048", itl_p99=0.01, good_share=0.1),
        row("mixed 128", itl_p99=0.06, good_share=0.6),
        row("mixed 64", itl_p99=0.05, good_share=0.6),
        row("separated", (200, 1.0), itl_p99=0.02, good_share=0.9),  # without a rival so far
    ]
    found = [(each["by"], each["setup"], each["ratio"]) for each in tables.rival_rows(rows)]
    assert found == [("ITL p99", "mixed 2048", 0.5), ("good share", "mixed 64", pytest.approx(1.5))]


def test_a_crossing_lies_where_the_lead_changes() -> None:
    own, one, other = (1.0, 5.0, 5.0), (9.0, 4.0, 9.0), (3.0, 8.0, 7.0)
    rows: list[Row] = []
    for number, rate in enumerate((0.1, 0.2, 0.4)):
        at = (100, rate)
        rows += [row(s, at, itl_p99=of[number]) for s, of in (("separated", own), ("mixed 64", one), ("mixed 2048", other))]
    # leads are -2, +1, -2
    assert tables.crossings(rows, "rate", "itl_p99") == pytest.approx([0.1 + 0.1 * 2 / 3, 0.2 + 0.2 / 3])
    assert tables.crossings(rows[:3], "rate", "itl_p99") == []
    flipped = [each | {"good_share": each["itl_p99"]} for each in rows]
    assert tables.crossings(flipped, "rate", "good_share") == pytest.approx([])  # never ahead of the best: that is highest here


def test_charts_are_over_what_varies() -> None:
    def rows(*points: tuple[int, float]) -> list[Row]:
        figures = {"itl_p50": 0.1, "itl_p99": 0.2, "ttft_p50": 1.0, "ttft_p99": 2.0, "good_share": 0.5}
        return [row(setup, point, **figures) for point in points for setup in ("separated", "mixed 64")]

    assert tables.charts([]) == []
    assert all(isinstance(picture, Bars) for picture in tables.charts(rows((100, 1.0))))
    for points, label, count in (
        (((100, 1.0), (100, 2.0)), "long prompts per second", 3),
        (((100, 1.0), (200, 1.0)), "tokens of the long prompts", 3),
        (((100, 1.0), (200, 1.0), (100, 2.0), (200, 2.0)), "long prompts per second", 6),
    ):
        pictures = tables.charts(rows(*points))
        assert len(pictures) == count
        assert all(isinstance(picture, Chart) and picture.x_label == label for picture in pictures)


def test_limits_are_judged_where_stalls_can_be_seen() -> None:
    own = row("separated", itl_p99=0.02)
    rare = row("mixed 2048", itl_p99=0.05, prompts=9, streams=2, gaps=2000)
    often = rare | {"itl_p99": 0.08, "gaps": 1800}
    transfers = [row("", hidden=0.79), row("", hidden=None)]  # type: ignore[arg-type]
    assert [(each["verdict"], each["figure"]) for each in limit_rows([own, rare], [])] == [("not judged", pytest.approx(2.5))]
    found = list(limit_rows([own, often, row("mixed 64", itl_p99=0.01)], transfers))
    assert [each["verdict"] for each in found] == ["held", "MISSED"]
    assert found[0]["name"] == "ITL p99, mixed 2048 / separated, 100 x 1/s"
    assert list(limit_rows([own], [])) == list(limit_rows([often], [])) == []


def test_answers_that_differ_are_found() -> None:
    one, longer = asked("stream 0", [], [1, 2, 3]), asked("stream 0", [], [1, 2, 3, 4, 5])
    check_answers([("a", turn(one)), ("b", turn(longer))])
    with pytest.raises(TokenmillError, match=r"c and b gave different answers to stream 0.0: from token 4 on it is \[6\] instead of \[5\]"):
        check_answers([("a", turn(one)), ("b", turn(longer)), ("c", turn(asked("stream 0", [], [1, 2, 3, 4, 6])))])
    full, cut = asked("long 0", [], [1, 2], long=True), asked("long 0", [], [1], long=True)
    check_answers([("a", turn(full)), ("b", turn(full))])
    with pytest.raises(TokenmillError, match="different answers to long 0: from token 1 on"):
        check_answers([("a", turn(full)), ("b", turn(cut))])


@pytest.mark.parametrize("seed", range(20))
def test_one_wrong_token_is_found_wherever_it_is(seed: int) -> None:
    rng = random.Random(seed)
    full = [rng.randrange(9) for _ in range(30)]
    lengths = [rng.randrange(1, 30) for _ in range(4)]
    turns = [(f"s{i}", turn(asked("stream 0", [], full[:length]))) for i, length in enumerate(lengths)]
    check_answers(turns)
    victim = rng.randrange(4)
    at = rng.randrange(lengths[victim])
    if sum(length > at for length in lengths) > 1:  # somebody else knows better
        turns[victim][1].asked[0].tokens[at] += 1
        with pytest.raises(TokenmillError, match=f"from token {at} on"):
            check_answers(turns)


async def test_setups_take_turns_in_an_order_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int, float]] = []

    async def take_turn(setup: Setup, demand: Demand) -> tuple[Turn, EngineInfo]:
        order.append((setup.name, demand.number, demand.rate))
        wrong = demand.number == 1 and setup.name == "mixed 64"
        transfers = Transfers(1, 1, 1, 1.0, 1.0, [1.0]) if setup.separated else None
        return replace(turn(asked("stream 0", [0.0, 1.0], [1, 9 if wrong else 2]), transfers=transfers), demand=demand), info

    monkeypatch.setattr(rounds, "take_turn", take_turn)
    info = EngineInfo(
        model="m", architecture="llama", vocab_size=9, max_model_len=40, kv_tokens=40, kv_bytes=4000, kv_bytes_per_token=100,
        kv_format="bf16", kv_bytes_saved_per_token=0, max_batch_size=4, chunk_size=8, threads=1, kernels="portable", fingerprint="f",
        pid=1, load_seconds=0.1,
    )  # fmt: skip
    three = [Setup(name, None, ()) for name in ("separated", "mixed 2048", "mixed 64")]  # type: ignore[arg-type]
    measured = Rounds(three, [replace(DEMAND, rate=rate) for rate in (0.5, 1.0)], 2, lambda text: None)
    with pytest.raises(TokenmillError, match="mixed 64 and mixed 2048 gave different answers"):
        await measured.take()
    first = [("separated", 0, 0.5), ("mixed 2048", 0, 0.5), ("mixed 64", 0, 0.5)]
    assert order[:6] == [*first, ("mixed 2048", 0, 1.0), ("mixed 64", 0, 1.0), ("separated", 0, 1.0)]
    assert order[6:] == [("mixed 2048", 1, 0.5), ("mixed 64", 1, 0.5)]
    found = [(each["setup"], each["rate"], each["rounds"]) for each in measured.setup_rows(OBJECTIVE)]
    assert found[:3] == [("separated", 0.5, 1), ("mixed 2048", 0.5, 2), ("mixed 64", 0.5, 1)]  # the wrong turn does not count
    assert [each["rate"] for each in measured.transfer_rows()] == [0.5, 1.0]
    assert measured.kernels == "portable"


def test_setups_have_the_same_threads_and_memory_for_each_worker(smollm2_path: Path) -> None:
    found = setups(smollm2_path, [DEMAND], ["64", "paced", "2048"], 128, 2, None, {"connector": "shm"})
    assert [setup.name for setup in found] == ["separated", "mixed 2048", "mixed 64", "mixed paced"]
    assert [setup.separated for setup in found] == [True, False, False, False]
    assert [[plan.role for plan in setup.plans] for setup in found] == [[Role.PREFILL, Role.DECODE], *[[Role.MIXED]] * 3]
    configs = [[plan.config for plan in setup.plans] for setup in found]
    assert [[config.threads for config in each] for each in configs] == [[1, 1], [2], [2], [2]]
    assert [[config.chunk for config in each] for each in configs] == [[128, 512], [2048], [64], [512]]
    assert [config[0].longest_step is None for config in configs] == [True, True, True, False]
    budgets = {config.kv_cache_config.memory_budget_gb for each in configs for config in each}
    assert len(budgets) == 1
    assert all(config.max_model_len == DEMAND.longest == 208 for each in configs for config in each)


def test_what_does_not_fit_is_an_error_before_anything_runs(smollm2_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"have 9008 tokens, but the model's context is 8192: lower --prompt-tokens"):
        setups(smollm2_path, [replace(DEMAND, prompt_tokens=9000)], [], 128, 2, None, {"connector": "shm"})
    with pytest.raises(ConfigError, match=r"GB are free: lower --prompts or --prompt-tokens"):
        setups(smollm2_path, [replace(DEMAND, prompt_tokens=8000, prompts=100_000)], [], 128, 2, None, {"connector": "shm"})


@pytest.mark.parametrize("text", ["", "7", "64,x", "16385", "-64", "64.5", "paced,", "٦٤"])
def test_chunks_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--chunks is"):
        parse_chunks(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "1,,2", "nan", "1e3", "0.0"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--rates is"):
        rates(text, "--rates")
    assert rates("2, 0.5,2", "--rates") == [0.5, 2.0]
