"""Health along timelines: workers that answer, step, stand still, die and come back, by a clock that is told to move."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from tokenmill.cluster.health import Blame, Change, HealthMonitor, HealthPolicy, State, blame
from tokenmill.core.clock import ManualClock
from tokenmill.core.errors import ConfigError

DT = 0.1
BOUND = 10.0
"""Seconds for which no state may be wrong: twice the default interval."""


@dataclass
class Machine:
    """What a worker really does. rows: of its step; 0: it has no work. step_seconds: how long a step takes."""

    boot: str = "first"
    answers: bool = True
    steps: bool = True
    rows: int = 0
    step_seconds: float = 0.3
    speed: float | None = None
    counter: int = 0
    waits_for_peer: bool = False
    under_way: float = 0.0
    questions: int = 0


@dataclass
class World:
    """A monitor that ticks every second, and workers whose messages take no time."""

    policy: HealthPolicy = field(default_factory=HealthPolicy)
    start: float = 1000.0
    machines: dict[str, Machine] = field(default_factory=dict)
    changes: list[tuple[float, Change]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = ManualClock(self.start)
        self.monitor = HealthMonitor(self.clock, self.policy)
        self._instants = 0

    @property
    def now(self) -> float:
        return self.clock.now() - self.start

    def join(self, name: str = "w", **what: object) -> Machine:
        machine = self.machines[name] = Machine(**what)  # type: ignore[arg-type]
        self.monitor.join(name, machine.boot)
        return machine

    def state(self, name: str = "w") -> State:
        return self.monitor.verdict(name).state

    def run(self, seconds: float, *, gateway: bool = True) -> None:
        """gateway: whether it runs meanwhile, too."""
        for _ in range(round(seconds / DT)):
            self.clock.advance(DT)
            self._instants += 1
            for name, machine in self.machines.items():
                self._work(name, machine, gateway)
            if gateway and self._instants % 10 == 0:
                self._tick()

    def until(self, state: State, name: str = "w", limit: float = 1000.0) -> float:
        """Seconds until a worker has that state."""
        begin = self.now
        while self.state(name) is not state:
            assert self.now - begin < limit, f"{name} is {self.monitor.verdict(name)} after {limit} s"
            self.run(DT)
        return self.now - begin

    def _work(self, name: str, machine: Machine, gateway: bool) -> None:
        if machine.steps and machine.rows and not machine.waits_for_peer:
            machine.under_way += DT
            if machine.under_way >= machine.step_seconds - DT / 2:
                machine.under_way = 0.0
                machine.counter += 1
                if machine.answers and gateway:
                    self.monitor.stepped(name, machine.boot)
        if machine.answers and gateway:
            while machine.questions:
                machine.questions -= 1
                idle = machine.steps and (not machine.rows or machine.waits_for_peer)
                self.monitor.counted(name, machine.boot, machine.counter, idle=idle)

    def _tick(self) -> None:
        for name, machine in self.machines.items():
            self.monitor.working(name, machine.rows, machine.speed)
        self.changes += [(self.now, change) for change in self.monitor.tick()]
        for name in self.monitor.to_ask():
            self.machines[name].questions += 1

    def told(self, name: str = "w") -> list[State]:
        return [change.after for _, change in self.changes if change.worker_id == name]


PHASES = [round(0.1 * number, 1) for number in range(12)]


@pytest.mark.parametrize("rows", [0, 1, 500])
def test_a_worker_that_answers_and_moves_stays_healthy(rows: int) -> None:
    world = World()
    world.join(rows=rows)
    world.run(300)
    assert world.changes == []


@pytest.mark.parametrize("phase", PHASES)
def test_an_idle_worker_that_falls_silent_is_suspect_and_then_unhealthy_within_the_bound(phase: float) -> None:
    world = World()
    machine = world.join()
    world.run(20 + phase)
    machine.answers = False
    assert 1 < world.until(State.SUSPECT) < world.policy.suspect_after + 2
    world.run(0)
    assert world.until(State.UNHEALTHY) + world.policy.suspect_after < BOUND
    assert world.told() == [State.SUSPECT, State.UNHEALTHY]
    world.run(3600)
    assert (world.state(), len(world.changes)) == (State.UNHEALTHY, 2)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("answers", [False, True])
def test_a_busy_worker_that_stands_still_is_unhealthy_within_the_bound_even_if_it_answers(phase: float, answers: bool) -> None:
    world = World()
    machine = world.join(rows=8)
    world.run(20 + phase)
    machine.steps, machine.answers = False, answers
    assert world.until(State.UNHEALTHY) <= BOUND
    reason = world.monitor.verdict("w").reason
    assert ("has not advanced" if answers else "has said nothing") in reason
    assert "(limit 6.0 s)" in reason


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_accepts_but_never_begins_is_unhealthy_within_the_bound(phase: float) -> None:
    world = World()
    machine = world.join(steps=False)
    machine.steps = True
    world.run(50 + phase)
    machine.steps, machine.rows = False, 1
    assert world.until(State.UNHEALTHY) <= BOUND


@pytest.mark.parametrize("phase", PHASES)
def test_steps_that_only_the_counter_tells_of_are_progress_and_their_end_is_seen_within_the_bound(phase: float) -> None:
    """As of a worker whose answers come from another thread than its steps, and whose steps put out nothing."""
    world = World()
    world.join()
    machine = world.machines.pop("w")
    hangs_at = 60 + phase
    while world.state() is not State.UNHEALTHY:
        world.clock.advance(DT)
        world._instants += 1
        machine.counter += world.now < hangs_at
        if world._instants % 10 == 0:
            world.monitor.working("w", 1)
            world.monitor.tick()
            if world.monitor.to_ask():
                world.monitor.counted("w", "first", machine.counter)
        assert world.state() is State.HEALTHY or world.now > hangs_at
    assert world.now - hangs_at <= BOUND


def test_a_long_step_is_no_hang() -> None:
    """512 prompt tokens at 20 a second: 25.6 s in which nothing is said."""
    world = World()
    machine = world.join(rows=512, speed=20.0, step_seconds=25.6)
    machine.answers = True
    machine.steps = True
    world.run(300)
    assert machine.counter > 10
    assert world.changes == []


def test_a_model_whose_every_step_is_slow_is_no_hang_and_a_hang_of_it_is_seen_by_the_time_that_its_steps_take() -> None:
    """As of a large model that decodes one stream: its one row says nothing about the weights that are read for it."""
    world = World()
    machine = world.join(rows=1, speed=1000.0, step_seconds=5.5)
    world.run(13)
    assert world.told() == 2 * [State.SUSPECT, State.HEALTHY], "of the first steps nothing is known"
    machine.step_seconds = 8.0
    world.run(100)
    assert len(world.changes) == 4
    machine.steps = machine.answers = False
    assert 20 < world.until(State.UNHEALTHY) < 4 * 8.0 + 3


def test_a_slow_model_without_work_is_no_excuse_for_silence() -> None:
    world = World()
    machine = world.join(rows=1, step_seconds=5.5)
    world.run(50)
    machine.rows = 0
    world.run(6)
    machine.answers = False
    assert world.until(State.UNHEALTHY) <= BOUND


def test_a_first_output_that_comes_before_any_step_hides_nothing_of_how_long_steps_take() -> None:
    """A worker may tell that its loop has begun before its first step is over."""
    world = World()
    machine = world.join(rows=0, step_seconds=8.0)
    for _ in range(5):
        machine.rows = 1
        world.run(1.5)
        world.monitor.stepped("w", "first")
        world.run(40)
        machine.rows, machine.under_way = 0, 0.0
        world.run(20)
    last = [change for at, change in world.changes if at > 60]
    assert last == []


def test_steps_that_were_slow_long_ago_excuse_nothing() -> None:
    world = World()
    machine = world.join(rows=1, step_seconds=8.0)
    world.run(400)
    machine.step_seconds = 0.3
    world.run(10)
    machine.answers = machine.steps = False
    assert world.until(State.UNHEALTHY) <= BOUND


def test_the_time_between_outputs_of_work_that_others_have_given_is_not_that_of_a_step() -> None:
    world = World()
    machine = world.join(steps=False)
    for _ in range(10):
        world.run(60)
        world.monitor.stepped("w", "first")
    machine.rows, machine.answers = 1, False
    assert world.until(State.UNHEALTHY) <= BOUND


def test_one_step_that_took_very_long_does_not_excuse_the_next_ones() -> None:
    world = World()
    machine = world.join(rows=4)
    world.run(10)
    machine.answers = machine.steps = False
    world.run(600)
    machine.answers = machine.steps = True
    world.run(5)
    machine.answers = machine.steps = False
    assert world.until(State.UNHEALTHY) <= BOUND


@pytest.mark.parametrize("speed", [20.0, 200.0])
def test_a_hang_in_a_long_step_is_seen_after_a_margin_that_its_tokens_and_the_measured_speed_give(speed: float) -> None:
    world = World()
    machine = world.join(rows=512, speed=speed, step_seconds=512 / speed)
    world.run(100)
    machine.steps = machine.answers = False
    limit = max(world.policy.unhealthy_after, 4 * 512 / speed)
    assert limit - 512 / speed - 1 <= world.until(State.UNHEALTHY) <= limit + 3


def test_before_a_worker_is_measured_it_is_believed_to_be_slow() -> None:
    world = World()
    world.join(rows=512, steps=False, answers=False)
    assert 60 < world.until(State.UNHEALTHY) < 70
    world = World()
    world.join(rows=16, steps=False, answers=False)
    assert world.until(State.UNHEALTHY) <= BOUND


def test_a_step_that_has_lost_its_requests_may_still_take_as_long() -> None:
    world = World()
    machine = world.join(rows=512, speed=20.0, step_seconds=25.6)
    world.run(26.0)
    world.run(4.0)
    machine.answers, machine.rows = False, 0  # its requests are aborted, while it is computing them
    world.run(21.6)
    machine.answers = True
    world.monitor.stepped("w", "first")
    assert world.changes == []
    world.run(20)
    machine.answers = False
    assert world.until(State.UNHEALTHY) <= BOUND, "what is long over excuses nothing"


def test_a_worker_that_was_stopped_is_healthy_again_as_soon_as_it_moves() -> None:
    world = World()
    machine = world.join(rows=4)
    world.run(10)
    machine.answers = machine.steps = False
    world.run(25)
    assert world.state() is State.UNHEALTHY
    machine.answers = machine.steps = True
    assert world.until(State.HEALTHY) < 1
    world.run(60)
    assert world.told() == [State.SUSPECT, State.UNHEALTHY, State.HEALTHY]


def test_an_answer_alone_does_not_excuse_a_worker_that_stands_still_even_when_its_work_has_gone_elsewhere() -> None:
    world = World()
    machine = world.join(rows=4)
    world.run(10)
    machine.steps = False
    world.until(State.UNHEALTHY)
    machine.rows = 0
    world.run(300)
    assert world.state() is State.UNHEALTHY
    machine.rows = 2
    world.run(3)
    machine.rows = 0
    world.run(3)
    assert world.told() == [State.SUSPECT, State.UNHEALTHY], "nor does new work"
    machine.steps = True  # its loop says that it has nothing to do, which only a loop that runs can say
    assert world.until(State.HEALTHY) < 3
    machine.rows = 4
    world.run(60)
    assert world.told() == [State.SUSPECT, State.UNHEALTHY, State.HEALTHY]


def test_a_worker_that_has_moved_again_is_not_held_to_stand_still_when_its_work_is_done() -> None:
    clock = ManualClock()
    monitor = HealthMonitor(clock)
    monitor.join("w", "first")
    states = []
    for second in range(60):
        monitor.working("w", int(second < 12))
        monitor.tick()
        states.append(monitor.verdict("w").state)
        clock.advance(1)
        monitor.heard("w", "first")
        if second == 10:
            monitor.stepped("w", "first")
    assert states[10] is State.UNHEALTHY
    assert set(states[11:]) == {State.HEALTHY}


def test_an_idle_worker_that_was_silent_is_healthy_with_its_first_word() -> None:
    world = World()
    machine = world.join()
    world.run(10)
    machine.answers = False
    world.run(30)
    assert world.state() is State.UNHEALTHY
    world.monitor.heard("w", "first")
    assert world.state() is State.HEALTHY


@pytest.mark.parametrize("phase", PHASES)
def test_work_given_to_an_idle_worker_gives_it_time(phase: float) -> None:
    world = World()
    machine = world.join()
    world.run(100 + phase)
    machine.rows, machine.step_seconds = 4, 3.9
    world.run(100)
    assert world.changes == []


def test_the_end_of_a_stream_is_death_at_once_and_for_good() -> None:
    world = World()
    world.join(rows=3)
    world.run(10)
    world.monitor.ended("w", "first")
    assert world.state() is State.GONE
    world.monitor.heard("w", "first")
    world.monitor.stepped("w", "first")
    world.monitor.counted("w", "first", 10**9, idle=True)
    questions = world.machines["w"].questions
    world.machines["w"].answers = False
    world.run(30)
    assert world.told() == [State.GONE]
    assert world.monitor.verdict("w").reason == "its stream has ended"
    assert world.machines["w"].questions == questions, "the dead are not asked"


def test_a_process_under_a_new_boot_is_healthy_and_late_news_of_the_old_one_changes_nothing() -> None:
    world = World()
    world.join(rows=3, counter=10**6)
    world.run(10)
    world.monitor.ended("w", "first")
    world.join(boot="second", rows=3)
    world.run(2)
    world.monitor.ended("w", "first")
    assert world.state() is State.HEALTHY
    world.run(60)
    assert world.told() == [State.GONE, State.HEALTHY], "its counter starts anew"
    world.machines["w"].steps = world.machines["w"].answers = False
    begin = world.now
    while world.state() is not State.UNHEALTHY:
        world.monitor.heard("w", "first")
        world.monitor.stepped("w", "first")
        world.monitor.counted("w", "first", 10**9, idle=True)
        world.run(DT)
    assert world.now - begin <= BOUND


def test_a_new_process_in_place_of_a_hung_one_has_a_clean_record() -> None:
    world = World()
    machine = world.join(rows=600)
    world.run(10)
    machine.steps = False
    world.until(State.UNHEALTHY)
    machine = world.join(boot="second")
    assert world.state() is State.HEALTHY
    world.run(30)
    machine.answers = False
    assert world.until(State.UNHEALTHY) <= BOUND


def test_silence_while_the_gateway_itself_was_stopped_is_nobodys_fault() -> None:
    world = World()
    world.join("idle")
    world.join("busy", rows=4)
    hung = world.join("hung", rows=4)
    world.run(20)
    hung.steps = hung.answers = False
    world.run(1)
    world.run(600, gateway=False)
    world._tick()  # before anything of what has arrived meanwhile is read
    world.run(3)
    assert {name: world.state(name) for name in ("idle", "busy")} == {"idle": State.HEALTHY, "busy": State.HEALTHY}
    assert {change.worker_id for _, change in world.changes} <= {"hung"}
    assert world.until(State.UNHEALTHY, "hung") <= BOUND, "but who stands still now is seen"
    world.run(60)
    assert {change.worker_id for _, change in world.changes} == {"hung"}


@pytest.mark.parametrize("rows", [0, 4])
def test_what_is_read_before_the_first_tick_after_an_absence_is_not_dated_ahead(rows: int) -> None:
    world = World()
    machine = world.join(rows=rows)
    world.run(20)
    world.run(600, gateway=False)
    world.monitor.stepped("w", "first")
    machine.steps = machine.answers = False
    world._tick()
    assert world.until(State.UNHEALTHY) <= BOUND


def test_a_suspect_worker_is_not_condemned_by_what_it_says_after_the_gateway_was_stopped() -> None:
    world = World()
    machine = world.join(rows=4)
    world.run(20)
    machine.steps = machine.answers = False
    world.until(State.SUSPECT)
    world.run(600, gateway=False)
    world.monitor.heard("w", "first")
    machine.steps = machine.answers = True
    world.run(60)
    assert world.told() == [State.SUSPECT, State.HEALTHY]


def test_a_dead_peer_makes_nobody_unhealthy() -> None:
    """A decode worker all of whose sequences wait for frames of a prefill worker that has stopped."""
    world = World()
    world.join("p", rows=8)
    waiting = world.join("d", rows=4)
    world.run(10)
    world.machines["p"].steps = world.machines["p"].answers = False
    waiting.waits_for_peer = True
    world.run(30)
    assert (world.state("p"), world.state("d")) == (State.UNHEALTHY, State.HEALTHY)
    world.monitor.ended("p", "first")
    world.run(300)
    assert {change.worker_id for _, change in world.changes} == {"p"}


def test_who_tells_of_steps_is_asked_once_an_interval_and_others_every_other_tick_but_never_twice_before_they_answer() -> None:
    world = World()
    busy, idle, silent = world.join("busy", rows=4), world.join("idle"), world.join("silent")
    asked: dict[str, list[float]] = {name: [] for name in world.machines}
    silent.answers = False
    for _ in range(600):
        before = {name: machine.questions for name, machine in world.machines.items()}
        world.run(DT)
        for name, machine in world.machines.items():
            if machine.questions > before[name]:
                asked[name].append(world.now)
    assert (busy.counter > 100, idle.counter) == (True, 0)
    gaps = {name: [round(b - a, 1) for a, b in itertools.pairwise(times)] for name, times in asked.items()}
    assert set(gaps["busy"]) <= {5.0, 6.0}
    assert len(gaps["busy"]) >= 9
    assert set(gaps["idle"]) <= {1.0, 2.0}
    assert len(asked["silent"]) == 1
    silent.answers = True
    world.run(DT)
    world.run(3)
    assert world.state("silent") is State.HEALTHY


def test_all_times_follow_the_interval() -> None:
    world = World(HealthPolicy(health_check_interval=50.0))
    machine = world.join()
    world.run(100)
    machine.answers = False
    assert 20 < world.until(State.SUSPECT) <= 50
    assert 10 < world.until(State.UNHEALTHY) <= 30


@pytest.mark.parametrize("name", ["health_check_interval", "step_margin", "assumed_speed"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_settings_that_would_make_everyone_unhealthy_or_no_one_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}, but must be above 0"):
        HealthPolicy(**{name: value})


def test_news_of_strangers_is_no_error_and_who_is_not_there_is_gone() -> None:
    world = World()
    world.monitor.heard("nobody", "first")
    world.monitor.stepped("nobody", "first")
    world.monitor.counted("nobody", "first", 5)
    world.monitor.ended("nobody", "first")
    world.join()
    assert world.monitor.verdict("nobody") == (State.GONE, "it has left")
    world.monitor.ended("w", "first")
    world.monitor.leave("w")
    assert world.monitor.verdict("w") == (State.GONE, "it has left")
    assert dict(world.monitor.ailing) == {}
    world.monitor.leave("w")


@pytest.mark.parametrize("seed", range(30))
def test_no_state_is_wrong_for_longer_than_the_bound(seed: int) -> None:
    """Workers begin and end to stand still, to be silent and to have work at random times."""
    rng = random.Random(seed)
    world = World()
    names = [f"w{number}" for number in range(4)]
    for name in names:
        world.join(name)
    right_at: dict[str, float] = dict.fromkeys(names, 0.0)
    truths: dict[str, tuple[bool, bool]] = {}
    seen: set[State] = set()
    for _ in range(3000):
        name = rng.choice(names)
        machine = world.machines[name]
        if rng.random() < 0.01:
            machine.steps = not machine.steps
            machine.answers = machine.answers if machine.steps else rng.random() < 0.5
        if rng.random() < 0.01:
            machine.answers = not machine.answers
        if rng.random() < 0.02:
            machine.rows = rng.choice([0, 1, 40])
        world.run(DT)
        for name, machine in world.machines.items():
            moves = machine.steps or not machine.rows
            truth = State.HEALTHY if machine.answers and moves else State.UNHEALTHY
            state = world.state(name)
            seen.add(state)
            if truths.get(name) != (machine.answers, moves):  # one fault after another shows like a sign of life between them
                truths[name], right_at[name] = (machine.answers, moves), world.now
            # What stood still and has lost its work has not shown yet that it moves: it may be held to be unhealthy.
            unproven = state is State.UNHEALTHY and not machine.steps
            if state is truth or unproven or (state is State.SUSPECT and world.now - right_at[name] < BOUND):
                right_at[name] = world.now
            assert world.now - right_at[name] <= BOUND, f"seed {seed}: {name} is {state}, but {machine}"
    assert seen == {State.HEALTHY, State.SUSPECT, State.UNHEALTHY}, f"seed {seed}"


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (State.GONE, State.HEALTHY, Blame.SOURCE),
        (State.HEALTHY, State.GONE, Blame.TARGET),
        (State.GONE, State.UNHEALTHY, Blame.SOURCE),
        (State.UNHEALTHY, State.GONE, Blame.TARGET),
        (State.UNHEALTHY, State.SUSPECT, Blame.SOURCE),
        (State.HEALTHY, State.UNHEALTHY, Blame.TARGET),
        (State.HEALTHY, State.HEALTHY, Blame.LINK),
        (State.SUSPECT, State.HEALTHY, Blame.LINK),
        (State.HEALTHY, State.SUSPECT, Blame.LINK),
        (State.UNHEALTHY, State.UNHEALTHY, Blame.LINK),
        (State.GONE, State.GONE, Blame.LINK),
    ],
)
def test_a_failed_hand_over_is_blamed_on_who_is_provably_at_fault_alone(source: State, target: State, expected: Blame) -> None:
    assert blame(source, target) is expected
