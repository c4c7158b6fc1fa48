"""Whom the router chooses: each strategy's property, sessions, and what is never chosen."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from workers import worker

from tokenmill.cluster.fleet import Fleet
from tokenmill.cluster.router import Choice, RouterPolicy
from tokenmill.cluster.strategies import STRATEGIES, RouteRequest
from tokenmill.core.blocks import BLOCK, block_hashes
from tokenmill.core.clock import ManualClock
from tokenmill.core.errors import ConfigError, ContextLengthExceeded, ModelNotFound, Unavailable
from tokenmill.core.roles import Role

SHORT = RouteRequest(model="m", prompt_tokens=100)


def prompt(tokens: int, name: int = 0) -> RouteRequest:
    """A prompt that has its blocks in common with those of the same name."""
    return RouteRequest(model="m", prompt_tokens=tokens, hashes=block_hashes([name] * tokens, "", "f"))


class Setup:
    """A fleet that is given what is chosen."""

    def __init__(self, strategy: str = "min_decode_queue", n_workers: int = 4, role: Role = Role.MIXED, **policy: int) -> None:
        self.clock = ManualClock(1000.0)
        self.fleet = Fleet(self.clock, router=RouterPolicy(routing_strategy=strategy, **policy))
        self.given = 0
        for number in range(n_workers):
            self.fleet.join(worker(f"w{number}", role))

    def choose(self, request: RouteRequest = SHORT, wanted: Role = Role.MIXED, **options: object) -> Choice:
        return self.fleet.router.choose(request, wanted, **options)  # type: ignore[arg-type]

    def give(self, worker_id: str, tokens: int = 100, role: Role = Role.MIXED, *, running: bool = False) -> int:
        self.given += 1
        self.fleet.loads.give(self.given, worker_id, role, prompt_tokens=tokens)
        if running:
            self.fleet.loads.output(self.given)
        return self.given

    def send(self, request: RouteRequest = SHORT, wanted: Role = Role.MIXED, *, running: bool = False) -> str:
        """Choose and give; with blocks, the worker has them from now on."""
        chosen = self.choose(request, wanted).found().id
        self.give(chosen, request.prompt_tokens - self.fleet.router.cached_tokens(chosen, request), wanted, running=running)
        self.fleet.prefixes.add(chosen, request.hashes)
        return chosen

    def make_unhealthy(self, worker_id: str) -> None:
        """It is silent while the others are not."""
        for _ in range(7):
            self.clock.advance(1)
            for one in self.fleet.registry:
                if one.id != worker_id:
                    self.fleet.health.counted(one.id, one.boot, 0, idle=True)
            self.fleet.tick()

    def trip(self, key: str | tuple[str, str]) -> None:
        for _ in range(3):
            self.fleet.breakers.failed(self.fleet.breakers.begin(key))


# strategies


def test_min_decode_queue_takes_the_fewest_streams_and_of_those_the_fewest_tokens() -> None:
    setup = Setup()
    setup.give("w0", 10)
    setup.give("w0", 10)
    for name, tokens in (("w1", 900), ("w2", 800), ("w3", 2000)):
        setup.give(name, tokens, running=True)
    assert setup.choose().found().id == "w2"


def test_min_decode_queue_takes_the_fewest_waiting_prompt_tokens_for_a_prompt_alone() -> None:
    setup = Setup()
    setup.give("w0", 500)
    setup.give("w1", 9000, running=True)
    setup.give("w2", 1)
    setup.give("w3", 1)
    setup.give("w1", 1, running=True)
    assert setup.choose(wanted=Role.PREFILL).found().id == "w1"


def test_min_decode_queue_takes_of_equal_queues_of_prompts_the_fewest_streams() -> None:
    setup = Setup(n_workers=3)
    for name, streams in (("w0", 2), ("w1", 1), ("w2", 3)):
        for _ in range(streams):
            setup.give(name, 10, running=True)
    assert setup.choose(wanted=Role.PREFILL).found().id == "w1"


def test_least_tokens_counts_prompts_that_wait_and_positions_that_are_kept() -> None:
    setup = Setup("least_tokens")
    for name, waiting, kept in (("w0", 100, 0), ("w1", 0, 199), ("w2", 50, 101), ("w3", 500, 0)):
        if waiting:
            setup.give(name, waiting)
        if kept:
            setup.give(name, kept, running=True)
    # A prompt that waits is work and takes room: 200, 200 (199 and a token put out), 202, 1000.
    assert setup.choose().found().id in {"w0", "w1"}
    setup.give("w0", 1)
    setup.give("w1", 2, running=True)
    assert setup.choose().found().id in {"w0", "w2"}
    setup.give("w0", 10)
    assert setup.choose().found().id == "w2"


@pytest.mark.parametrize("strategy", ["min_decode_queue", "least_tokens", "prefix_aware", "power_of_two"])
@pytest.mark.parametrize("wanted", list(Role))
def test_where_there_is_no_room_nobody_goes_while_there_is_room_elsewhere(strategy: str, wanted: Role) -> None:
    setup = Setup(strategy, n_workers=0)
    for name, changes in (("rows", {"max_batch_size": 3}), ("pool", {"kv_tokens": 250}), ("free", {})):
        setup.fleet.join(worker(name, **changes))
    request = prompt(BLOCK * 2)
    for _ in range(3):
        setup.give("rows", 1)
    setup.give("pool", 200, running=True)
    for _ in range(20):
        setup.give("free", 5000)
    setup.fleet.prefixes.add("rows", request.hashes)
    setup.fleet.prefixes.add("pool", request.hashes[:1])
    # With two drawn of three, the free one is among them two times in three, and never loses.
    found = Counter(setup.choose(request, wanted).found().id for _ in range(300))
    assert found["free"] == 300 if strategy != "power_of_two" else found["free"] > 150, found


def test_without_room_anywhere_a_worker_is_chosen_all_the_same() -> None:
    setup = Setup(n_workers=0)
    for number in range(3):
        setup.fleet.join(worker(f"w{number}", max_batch_size=1))
        setup.give(f"w{number}")
    setup.give("w0")
    assert setup.choose().found().id in {"w1", "w2"}


def test_a_prefix_that_a_worker_has_takes_no_room_there() -> None:
    setup = Setup("prefix_aware", n_workers=1)
    setup.fleet.join(worker("small", kv_tokens=3000))
    setup.give("small", 2000, running=True)
    request = prompt(1984)
    setup.fleet.prefixes.add("small", request.hashes)
    assert setup.choose(request).found().id == "small"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_workers_take_turns(strategy: str) -> None:
    setup = Setup(strategy, n_workers=5)
    found = [setup.choose().found().id for _ in range(500)]
    counts = Counter(found)
    assert set(counts) == {f"w{number}" for number in range(5)}
    if strategy == "power_of_two":
        assert min(counts.values()) > 60
    else:
        assert set(counts.values()) == {100}
        assert all(len(set(found[at : at + 5])) == 5 for at in range(0, 500, 5))


def test_round_robin_is_fair_whatever_the_load_and_whoever_comes_and_goes() -> None:
    setup = Setup("round_robin", n_workers=3)
    for _ in range(50):
        setup.give("w0")
    found = Counter(setup.choose().found().id for _ in range(30))
    assert found == {"w0": 10, "w1": 10, "w2": 10}
    without = Counter(setup.choose(excluded={"w1"}).found().id for _ in range(20))
    assert without == {"w0": 10, "w2": 10}
    setup.fleet.join(worker("new"))
    after = [setup.choose().found().id for _ in range(12)]
    assert set(after[:2]) == {"w1", "new"}, "who has missed turns is next, once"
    assert max(Counter(after).values()) == 3


def test_round_robin_counts_prompts_and_outputs_apart() -> None:
    setup = Setup("round_robin", n_workers=2)
    found = [(setup.choose(wanted=Role.PREFILL).found().id, setup.choose(wanted=Role.DECODE).found().id) for _ in range(10)]
    assert Counter(found) == {("w0", "w0"): 5, ("w1", "w1"): 5}


def spread(seed: int, strategy: str | None, n_workers: int, n_requests: int) -> int:
    """The most streams that a worker has after requests that do not end; None: drawn at random."""
    rng = random.Random(seed)
    setup = Setup(strategy or "round_robin", n_workers=n_workers, seed=seed)
    for _ in range(n_requests):
        if strategy is None:
            setup.give(f"w{rng.randrange(n_workers)}")
        else:
            setup.send()
    return max(setup.fleet.loads.by_worker[f"w{number}"].streams for number in range(n_workers))


@pytest.mark.parametrize("seed", range(5))
def test_power_of_two_balances_far_better_than_chance_and_the_shortest_queue_perfectly(seed: int) -> None:
    mean = 20
    random_most = spread(seed, None, 50, 50 * mean)
    two_most = spread(seed, "power_of_two", 50, 50 * mean)
    assert spread(seed, "min_decode_queue", 50, 50 * mean) == mean
    assert two_most - mean <= 3 < (random_most - mean) / 2, f"seed {seed}: {two_most}, {random_most}"


def test_power_of_two_is_the_same_again_with_the_same_seed() -> None:
    runs = [[Setup("power_of_two", n_workers=10, seed=seed).send() for _ in range(1)] for seed in (1, 1)]
    assert runs[0] == runs[1]
    first, second, other = (Setup("power_of_two", n_workers=10, seed=seed) for seed in (1, 1, 2))
    found = [[one.send() for _ in range(50)] for one in (first, second, other)]
    assert found[0] == found[1] != found[2]


def test_prefix_aware_prefers_the_longest_match() -> None:
    setup = Setup("prefix_aware")
    request = prompt(1024)
    setup.fleet.prefixes.add("w1", request.hashes[:4])
    setup.fleet.prefixes.add("w2", request.hashes[:12])
    assert setup.choose(request).found().id == "w2"
    assert setup.fleet.router.cached_tokens("w2", request) == 12 * BLOCK
    assert {setup.choose(prompt(1024, name=1)).found().id for _ in range(4)} == {"w0", "w1", "w2", "w3"}


def test_prefix_aware_weighs_what_is_missing_against_what_waits() -> None:
    setup = Setup("prefix_aware", n_workers=2, tokens_per_stream=256)
    request = prompt(1024)
    setup.fleet.prefixes.add("w0", request.hashes)
    setup.give("w0", 767)  # and 256 for its stream: 1023 tokens ahead, 1024 saved
    assert setup.choose(request).found().id == "w0"
    setup.give("w1", 1, Role.PREFILL)
    setup.give("w0", 3, Role.PREFILL)
    assert setup.choose(request).found().id == "w1"


def test_a_hot_prefix_does_not_pile_up_on_one_worker() -> None:
    setup = Setup("prefix_aware", n_workers=8, tokens_per_stream=256)
    request = prompt(2048)
    found = [setup.send(request, running=True) for _ in range(200)]
    assert len(set(found[:8])) == 1, "while it has a lead it is preferred"
    streams = [setup.fleet.loads.by_worker[f"w{number}"].streams for number in range(8)]
    assert max(streams) - min(streams) <= 2048 // 256 + 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pool_of_one_is_chosen_by_every_strategy(strategy: str) -> None:
    setup = Setup(strategy, n_workers=1)
    assert {setup.send(prompt(500), running=True) for _ in range(3)} == {"w0"}


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown routing_strategy 'min_decode_que': did you mean 'min_decode_queue'"):
        Setup("min_decode_que")
    with pytest.raises(ConfigError, match="known strategies: min_decode_queue, least_tokens, prefix_aware, power_of_two, round_robin"):
        Setup("zzzz")


@pytest.mark.parametrize("field", ["tokens_per_stream", "session_slack", "sessions", "prefix_blocks"])
def test_settings_out_of_range_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is -1, but must be at least"):
        RouterPolicy(**{field: -1})


# sessions


def in_session(name: str, tokens: int = 100) -> RouteRequest:
    return RouteRequest(model="m", prompt_tokens=tokens, session=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_session_stays_where_it_was_on_top_of_any_strategy(strategy: str) -> None:
    setup = Setup(strategy, n_workers=6)
    homes = {name: setup.send(in_session(name), running=True) for name in "abc"}
    for _ in range(3):
        setup.send()
        for name, home in homes.items():
            choice = setup.choose(in_session(name))
            assert (choice.found().id, choice.reason) == (home, "session")


@pytest.mark.parametrize("obstacle", ["left", "draining", "unhealthy", "excluded", "failing", "no rows", "no pool", "busy"])
def test_a_session_moves_when_its_worker_can_not_or_should_not_take_it(obstacle: str) -> None:
    setup = Setup(n_workers=0, session_slack=1000, tokens_per_stream=100)
    setup.fleet.join(worker("home", max_batch_size=20, kv_tokens=50_000))
    assert setup.choose(in_session("s")).found().id == "home"
    setup.fleet.join(worker("other"))
    excluded: set[str] = set()
    match obstacle:
        case "left":
            setup.fleet.leave("home", "first")
        case "draining":
            setup.fleet.registry.drain("home")
        case "unhealthy":
            setup.make_unhealthy("home")
        case "excluded":
            excluded = {"home"}
        case "failing":
            setup.trip("home")
        case "no rows":
            for _ in range(20):
                setup.give("home", 1, Role.PREFILL)
        case "no pool":
            setup.fleet.loads.give("old", "home", Role.PREFILL, prompt_tokens=49_901)
            setup.fleet.loads.remaining("old", 0)
        case "busy":
            setup.give("home", 901)
    choice = setup.choose(in_session("s"), excluded=excluded)
    assert (choice.found().id, choice.reason) == ("other", "min_decode_queue")
    again = setup.choose(in_session("s"))
    assert (again.found().id, again.reason) == ("other", "session")


def test_a_session_stays_on_a_worker_that_is_only_a_little_busier() -> None:
    setup = Setup(n_workers=2, session_slack=1000, tokens_per_stream=100)
    home = setup.choose(in_session("s")).found().id
    setup.give(home, 900)
    assert setup.choose(in_session("s")).found().id == home


def test_a_session_that_comes_back_to_a_full_pool_needs_room_only_for_what_is_missing() -> None:
    setup = Setup(n_workers=0)
    setup.fleet.join(worker("w0", kv_tokens=3000))
    request = RouteRequest(model="m", prompt_tokens=1984, hashes=prompt(1984).hashes, session="s")
    setup.choose(request)
    setup.fleet.join(worker("w1"))
    setup.give("w0", 2000, running=True)
    setup.fleet.prefixes.add("w0", request.hashes)
    assert setup.choose(request) == (setup.fleet.registry.get("w0"), "session", Unavailable)


def test_sessions_of_models_and_of_roles_are_apart() -> None:
    setup = Setup(n_workers=0)
    for name, role, model in (("p", Role.PREFILL, "m"), ("d", Role.DECODE, "m"), ("x", Role.MIXED, "n")):
        setup.fleet.join(worker(name, role, model=model))
    for _ in range(2):
        assert setup.choose(in_session("s"), Role.PREFILL).found().id == "p"
        assert setup.choose(in_session("s"), Role.DECODE).found().id == "d"
        assert setup.choose(RouteRequest(model="n", prompt_tokens=1, session="s")).found().id == "x"
    setup = Setup(n_workers=4)
    prefill = setup.choose(in_session("s"), Role.PREFILL).found().id
    setup.give(prefill, running=True)
    decode = setup.choose(in_session("s"), Role.DECODE).found().id
    assert prefill != decode
    assert setup.choose(in_session("s"), Role.PREFILL) == (setup.fleet.registry.get(prefill), "session", Unavailable)


def test_whole_requests_and_hand_overs_of_a_session_decode_at_one_place() -> None:
    setup = Setup("round_robin", n_workers=0)
    for name in ("p", "d0", "d1", "d2"):
        setup.fleet.join(worker(name, Role.PREFILL if name == "p" else Role.DECODE))
    home = setup.choose(in_session("s"), Role.MIXED).found().id
    assert setup.choose(in_session("s"), Role.DECODE) == (setup.fleet.registry.get(home), "session", Unavailable)
    assert setup.choose(in_session("s"), Role.PREFILL).found().id == "p"
    assert setup.choose(in_session("s"), Role.MIXED).found().id == home


def test_sessions_that_did_not_come_for_long_are_forgotten() -> None:
    setup = Setup("round_robin", n_workers=4, sessions=3)
    homes = [setup.choose(in_session(name)).found().id for name in "abc"]
    assert setup.choose(in_session("a")).reason == "session"
    setup.choose(in_session("d"))
    assert [setup.choose(in_session(name)).reason for name in "ac"] == ["session", "session"]
    assert setup.choose(in_session("b")).reason == "round_robin"
    assert len(set(homes)) == 3
    assert len(setup.fleet.router._sessions) == 3


# who is not chosen


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wanted", list(Role))
def test_an_empty_pool_is_an_answer_and_no_exception(strategy: str, wanted: Role) -> None:
    setup = Setup(strategy, n_workers=0)
    choice = setup.choose(SHORT, wanted)
    assert choice.worker is None
    with pytest.raises(Unavailable, match="no worker has joined yet"):
        choice.found()


@pytest.mark.parametrize(
    ("wanted", "roles", "reason"),
    [
        (Role.PREFILL, [Role.DECODE], "model 'm' has no prefill worker: start one"),
        (Role.DECODE, [Role.PREFILL], "model 'm' has no decode worker: start one"),
        (Role.MIXED, [Role.PREFILL], "model 'm' has no decode or mixed worker: start one"),
    ],
)
def test_a_model_without_a_worker_for_the_part_is_unavailable(wanted: Role, roles: list[Role], reason: str) -> None:
    setup = Setup(n_workers=0)
    for role in roles:
        setup.fleet.join(worker(role, role))
    with pytest.raises(Unavailable, match=reason) as caught:
        setup.choose(SHORT, wanted).found()
    assert caught.value.status == 503


def test_an_unknown_model_is_not_found_and_those_that_there_are_are_named() -> None:
    setup = Setup(n_workers=1)
    setup.fleet.join(worker("w9", model="n"))
    with pytest.raises(ModelNotFound, match="no worker serves model 'x': served here: m, n") as caught:
        setup.choose(RouteRequest(model="x", prompt_tokens=1)).found()
    assert (caught.value.status, caught.value.param) == (404, "model")


def test_a_request_longer_than_any_context_is_the_callers_fault_and_one_that_fits_somewhere_goes_there() -> None:
    setup = Setup(n_workers=0)
    setup.fleet.join(worker("short", max_model_len=1000))
    setup.fleet.join(worker("long", max_model_len=2000))
    setup.give("long", 500)
    assert setup.choose(RouteRequest(model="m", prompt_tokens=900, max_tokens=100)).found().id == "short"
    assert setup.choose(RouteRequest(model="m", prompt_tokens=900, max_tokens=101)).found().id == "long"
    exact = setup.choose(RouteRequest(model="m", prompt_tokens=1900, max_tokens=100), excluded={"long"})
    assert (exact.worker, exact.error) == (None, Unavailable), "it would fit there later"
    text = r"prompt \(1900 tokens\) and output \(up to 101\) exceed the longest context of a decode or mixed worker, 2000"
    with pytest.raises(ContextLengthExceeded, match=text):
        setup.choose(RouteRequest(model="m", prompt_tokens=1900, max_tokens=101)).found()


def test_the_reason_names_what_is_in_the_way_of_each() -> None:
    setup = Setup(n_workers=9)
    setup.make_unhealthy("w0")
    setup.fleet.health.ended("w1", "first")
    setup.fleet.registry.drain("w2")
    setup.fleet.registry.drain("w3")
    setup.trip("w4")
    setup.fleet.join(worker("w5", max_model_len=100))
    setup.fleet.join(worker("w6", fingerprint="g"))
    request = RouteRequest(model="m", prompt_tokens=100, fingerprint="f")
    choice = setup.choose(request, excluded={"w7", "w8"})
    assert choice.worker is None
    found = "1 unhealthy, 1 gone, 2 draining, 1 failing lately, 1 of a shorter context, 1 of another fingerprint, 2 tried already"
    assert choice.reason == f"no decode or mixed worker can take a request for 'm' now ({found}): try again shortly"
    assert setup.choose(request, excluded={"w8"}).found().id == "w7"


def test_a_suspect_worker_is_chosen_only_where_there_is_no_healthy_one() -> None:
    setup = Setup(n_workers=2)
    for _ in range(5):
        setup.clock.advance(1)
        setup.fleet.health.counted("w1", "first", 0, idle=True)
        setup.fleet.tick()
    for _ in range(9):
        setup.give("w1")
    assert setup.fleet.state("w0") == "suspect"
    assert setup.choose().found().id == "w1"
    assert setup.choose(excluded={"w1"}).found().id == "w0"


def test_a_link_that_fails_is_avoided_and_its_ends_are_not() -> None:
    setup = Setup(n_workers=0)
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        setup.fleet.join(worker(name, role))
    setup.trip(("p0", "d0"))
    assert {setup.choose(wanted=Role.PREFILL, peer="d0").found().id for _ in range(4)} == {"p1"}
    assert {setup.choose(wanted=Role.PREFILL, peer="d1").found().id for _ in range(4)} == {"p0", "p1"}
    assert {setup.choose(wanted=Role.PREFILL).found().id for _ in range(4)} == {"p0", "p1"}
    assert {setup.choose(wanted=Role.DECODE, peer="p0").found().id for _ in range(4)} == {"d1"}


def test_a_breaker_whose_time_is_over_lets_its_worker_be_chosen_for_one_attempt() -> None:
    setup = Setup(n_workers=1)
    setup.trip("w0")
    assert setup.choose().worker is None
    setup.clock.advance(1)
    assert setup.choose().found().id == "w0"
    probe = setup.fleet.breakers.begin("w0")
    assert setup.choose().worker is None
    setup.fleet.breakers.succeeded(probe)
    assert setup.choose().found().id == "w0"


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_only_who_can_take_a_request_is_chosen_and_someone_is_if_there_is_one(seed: int) -> None:
    rng = random.Random(seed)
    setup = Setup(rng.choice(list(STRATEGIES)), n_workers=0, seed=seed, sessions=5, prefix_blocks=300)
    fleet, boots = setup.fleet, Counter[str]()
    counts = Counter[bool]()
    for step in range(300):
        name = f"w{rng.randrange(6)}"
        match rng.randrange(9):
            case 0 | 1:
                boots[name] += rng.random() < 0.5
                role, model, fingerprint = rng.choice(list(Role)), rng.choice("mmn"), rng.choice("ffg")
                fleet.join(worker(name, role, model=model, boot=str(boots[name]), fingerprint=fingerprint))
            case 2 if rng.random() < 0.4:
                fleet.leave(name, str(boots[name]))
            case 3 if rng.random() < 0.4:
                fleet.registry.drain(name)
            case 4 if rng.random() < 0.4:
                fleet.health.ended(name, str(boots[name]))
            case 5:
                setup.clock.advance(rng.choice([0.5, 1.0]))
                for one in fleet.registry:
                    if rng.random() < 0.6:
                        fleet.health.counted(one.id, one.boot, step, idle=True)
                fleet.tick()
            case 6:
                key = rng.choice([name, (f"w{rng.randrange(6)}", f"w{rng.randrange(6)}")])
                attempt = fleet.breakers.begin(key)
                rng.choice([fleet.breakers.failed, fleet.breakers.failed, fleet.breakers.succeeded])(attempt)
            case _:
                wanted, peer = rng.choice(list(Role)), rng.choice([None, f"w{rng.randrange(6)}"])
                excluded = {f"w{rng.randrange(6)}" for _ in range(rng.randrange(3))}
                request = RouteRequest(
                    model=rng.choice("mmn"),
                    prompt_tokens=200,
                    hashes=prompt(200, rng.randrange(3)).hashes,
                    session=rng.choice([None, *"abcdefg"]),
                    fingerprint=rng.choice([None, "f"]),
                )
                able = {
                    state: {
                        one.id
                        for one in fleet.registry
                        if one.model == request.model
                        and one.role.takes(wanted)
                        and not fleet.registry.is_draining(one.id)
                        and one.id not in excluded
                        and request.fingerprint in (None, one.fingerprint)
                        and fleet.breakers.admits(one.id)
                        and (peer is None or fleet.breakers.admits((one.id, peer) if wanted is Role.PREFILL else (peer, one.id)))
                        and fleet.state(one.id) == state
                    }
                    for state in ("healthy", "suspect")
                }
                expected = able["healthy"] or able["suspect"]
                choice = setup.choose(request, wanted, excluded=excluded, peer=peer)
                counts[choice.worker is None] += 1
                assert (choice.worker is None) == (not expected), f"seed {seed}, step {step}: {choice}"
                if choice.worker is not None:
                    assert choice.worker.id in expected, f"seed {seed}, step {step}: {choice}"
                    setup.give(choice.worker.id, 200, wanted)
                    fleet.prefixes.add(choice.worker.id, request.hashes)
    assert sum(counts.values()) > 50, f"seed {seed}: {counts}"
