"""The governor: watching stays within its budget, and no interval flaps."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.probes.cost.governor import (
    LEAST_SHARE,
    MAX_FIRST_STEPS,
    MIN_FIRST,
    WIDE_MARGIN,
    Governor,
    ProbeLoad,
    factors,
)
from engine.probes.cost.meter import MeasuredStep, Meter
from engine.probes.watched.probe import ActiveProbe
from glasshouse.spec import Probe
from tests.unit.engine.runs import losses, of_type, run, spec


def watch(number=0, **changes) -> ActiveProbe:
    body = {"layers": ("*",), "kinds": ("output",), "every": 1, **changes}
    if changes.keys() & {"at", "on"}:
        body.pop("every")
    return ActiveProbe(number, Probe(**body))


class Job:
    """A job on a clock of its own: steps that take 1 ms, and looks that take what they are said."""

    def __init__(self, costs, *, step_s=1e-3, noise=0.0, seed=0):
        self.costs = costs
        self.told: list = []
        self.governor = Governor(self.told.append)
        self.governor.keep([*costs])
        self.spent: list[float] = []
        self.step = 0
        self.step_s = step_s
        self._noise = noise
        self._random = random.Random(seed)  # noqa: S311 - noise, not a secret

    def go(self, num_steps):
        for _ in range(num_steps):
            due = [item for item in self.costs if item.is_due(self.step)]
            found = {item: self._noisy(self.costs[item]) for item in due}
            self.spent.append(sum(found.values()) / self.step_s)
            if due:
                measured = MeasuredStep(self.step, self._noisy(self.step_s), found)
                self.governor.take(measured, self.step)
            self.step += 1
        return self

    @property
    def changes(self):
        return of_type(self.told, "adjusted")

    @property
    def budget(self):
        self.governor.report()
        return of_type(self.told, "overhead")[-1]["budget"]

    def _noisy(self, value):
        return value * math.exp(self._random.uniform(-self._noise, self._noise))

    def fraction(self, last):
        """What was really spent of the last steps."""
        return sum(self.spent[-last:]) / last


def test_forty_percent_settles_under_three_within_fifty_steps():
    one = watch()
    job = Job({one: 0.4e-3}).go(50)
    (change,) = job.changes
    assert change["step"] == MIN_FIRST - 1
    assert (change["from"], change["to"]) == (1, 32)  # 17 would fit; the next power of two
    assert one.every == 32
    assert job.go(3200).fraction(3200) <= 0.03
    assert len(job.changes) == 1
    assert job.governor.fractions() == pytest.approx((0.4 / 32, 0.0))


def test_a_cost_within_the_budget_changes_nothing():
    assert Job({watch(): 0.029e-3}).go(500).changes == []
    assert Job({watch(every=25): 0.7e-3}).go(500).changes == []


def test_no_budget_and_listed_steps_are_never_moved():
    free = watch(0, max_overhead=None)
    listed = watch(1, at=tuple(range(0, 400, 2)))
    job = Job({free: 1e-3, listed: 1e-3}).go(400)
    assert job.changes == []
    assert job.governor.fractions() == pytest.approx((1.5, 1.5))
    assert job.budget is None


def test_the_first_samples_alone_change_nothing():
    one = watch()
    job = Job({one: 5e-3})
    job.go(3)  # they allocate, say
    job.costs[one] = 0.01e-3
    assert job.go(300).changes == []


def test_rare_samples_are_evaluated_after_some_steps():
    job = Job({watch(every=20): 20e-3}).go(MAX_FIRST_STEPS + 1)
    (change,) = job.changes
    assert change["step"] == MAX_FIRST_STEPS
    assert (change["from"], change["to"]) == (20, 1280)


def test_an_interval_narrows_when_there_is_clear_room_and_widens_again():
    one = watch()
    job = Job({one: 0.4e-3}).go(50)
    job.costs[one] = 0.002e-3
    job.go(2000)
    assert one.every == 1
    job.costs[one] = 0.4e-3
    job.go(100)
    assert one.every == 32
    assert [(c["from"], c["to"]) for c in job.changes] == [(1, 32), (32, 1), (1, 32)]


def test_all_that_watch_together_stay_within_the_budget():
    pair = [watch(0), watch(1, every=2)]
    job = Job(dict.fromkeys(pair, 0.2e-3)).go(200)
    assert job.go(6400).fraction(6400) <= 0.03
    assert all(item.factor > 1 for item in pair)


def test_what_probes_without_a_budget_cost_is_distinguished_from_the_others():
    free, held = watch(0, max_overhead=None), watch(1, max_overhead=0.03)
    job = Job({free: 0.1e-3, held: 0.01e-3}).go(400)
    assert job.governor.fractions() == pytest.approx((0.11, 0.1))
    assert job.budget == 0.03


def test_a_probe_with_a_larger_budget_widens_less():
    strict, loose = watch(0, max_overhead=0.03), watch(1, max_overhead=0.2)
    job = Job({strict: 0.05e-3, loose: 0.5e-3}).go(3000)
    assert loose.factor == 4
    assert job.governor.fractions()[0] <= 0.2
    # others take more than its budget whatever it does: it keeps a part, and is not silenced
    least = 0.05 / (LEAST_SHARE * WIDE_MARGIN * 0.03)
    assert least <= strict.factor < 2 * least


def test_a_probe_outside_its_window_counts_for_nothing():
    early, late = watch(0, stop=20), watch(1, start=20)
    job = Job({early: 0.4e-3, late: 0.01e-3}).go(300)
    assert {change["probe"] for change in job.changes} == {"0"}
    assert job.governor.fractions()[0] == pytest.approx(0.01, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    cost=st.floats(1e-3, 20.0),
    every=st.sampled_from([1, 2, 7, 25]),
    budget=st.sampled_from([0.01, 0.03, 0.3]),
    noise=st.floats(0.0, 0.35),
    seed=st.integers(0, 1000),
)
def test_it_is_never_over_its_budget_for_long_and_never_oscillates(
    cost, every, budget, noise, seed
):
    one = watch(every=every, max_overhead=budget)
    job = Job({one: cost * 1e-3}, noise=noise, seed=seed)
    job.go(50 + 3 * every)
    settled = len(job.changes)
    before = job.step
    window = 60 * one.every
    job.go(min(window, 40_000))
    fair = cost / one.every
    assert fair <= budget * math.exp(2 * noise)
    if noise < 0.1:
        assert fair <= budget
    later = [change["step"] for change in job.changes[settled:]]
    assert len(later) <= 3
    assert all(step >= before for step in later)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(1e-6, 1e-1), st.integers(1, 100), st.sampled_from([0.01, 0.03, 0.1, 0.5])
        ),
        min_size=1,
        max_size=6,
    )
)
def test_widened_probes_stay_within_the_budget(given_loads):
    loads = [ProbeLoad(*item) for item in given_loads]
    found = factors(loads, 1e-3, WIDE_MARGIN)
    assert all(factor & (factor - 1) == 0 for factor in found)
    total = sum(
        load.cost_s / (load.every * factor) for load, factor in zip(loads, found, strict=True)
    )
    assert total / 1e-3 <= max(load.budget for load in loads) * 1.0001
    alone = min(load.budget for load in loads)
    if len({load.budget for load in loads}) == 1:
        assert total / 1e-3 <= WIDE_MARGIN * alone * 1.0001
    if total / 1e-3 < 0.2 * alone:
        assert max(found) == 1 or total > 0


# --- the meter -------------------------------------------------------------------------------


class Ticks:
    """A clock that the test moves; moments can be read once it says that they have passed."""

    def __init__(self):
        self.now = 0.0
        self.passed = math.inf

    def moment(self):
        return self.now

    def has_passed(self, moment):
        return moment <= self.passed

    def seconds(self, start, end):
        assert self.has_passed(end)
        return end - start


def test_a_step_is_measured_without_its_looks_and_each_look_goes_to_who_wanted_it():
    clock, one, two = Ticks(), watch(0), watch(1)
    meter = Meter(clock)
    meter.begin(7)
    meter.watch([one, two])
    outer = meter.start()
    for seconds, shares in ((3.0, [one]), (2.0, [one, two]), (4.0, {one: 1.0, two: 3.0})):
        clock.now += 0.5  # shared work between the looks
        started = meter.start()
        clock.now += seconds
        meter.stop(started, shares)
    meter.stop(outer, None)
    clock.now += 10.0
    meter.begin(8)
    (found,) = meter.take()
    assert found.step == 7
    assert found.own_s == 10.0
    assert sum(found.costs.values()) == 10.5
    direct = {one: 3 + 1 + 1.0, two: 1 + 3.0}
    assert found.costs[one] == pytest.approx(direct[one] + 1.5 * 5 / 9)
    assert found.costs[two] == pytest.approx(direct[two] + 1.5 * 4 / 9)
    assert list(meter.take()) == []


def test_a_step_is_read_only_when_the_device_has_passed_it():
    clock, one = Ticks(), watch()
    meter = Meter(clock)
    clock.passed = -1.0
    for step in range(3):
        meter.begin(step)
        meter.watch([one])
        started = meter.start()
        clock.now += 1.0
        meter.stop(started, [one])
        clock.now += 4.0
    meter.end()
    assert list(meter.take()) == []
    clock.passed = 10.0
    assert [(item.step, item.own_s, item.costs[one]) for item in meter.take()] == [
        (0, 4.0, 1.0),
        (1, 4.0, 1.0),
    ]
    clock.passed = math.inf
    assert [item.step for item in meter.take()] == [2]


class TwoQueues(Ticks):
    """A device whose queue another one is behind."""

    def __init__(self):
        super().__init__()
        self.there = 0.0
        self.passed_there = math.inf

    def moment_on(self, device):
        assert device == OTHER
        return (self.there,)

    def has_passed(self, moment):
        if isinstance(moment, tuple):
            return moment[0] <= self.passed_there
        return super().has_passed(moment)

    def seconds(self, start, end):
        if isinstance(start, tuple):
            assert self.has_passed(end)
            return end[0] - start[0]
        return super().seconds(start, end)


OTHER = torch.device("meta", 1)


def test_what_another_device_computes_is_measured_in_its_own_queue():
    clock, one, two = TwoQueues(), watch(0), watch(1)
    meter = Meter(clock)
    meter.begin(7)
    meter.watch([one, two])
    started = meter.start(OTHER)
    clock.there += 3.0
    meter.stop(started, [one], OTHER)
    started = meter.start()
    clock.now += 1.0
    meter.stop(started, [two])
    clock.now += 10.0
    meter.end()
    clock.passed_there = 2.0
    assert list(meter.take()) == [], "the other device is not so far"
    clock.passed_there = math.inf
    (found,) = meter.take()
    assert (found.costs[one], found.costs[two], found.own_s) == (3.0, 1.0, 7.0)


def test_unwatched_steps_are_not_measured():
    clock = Ticks()
    meter = Meter(clock)
    meter.begin(0)
    meter.stop(meter.start(), None)
    meter.watch([])
    clock.now += 5.0
    meter.begin(1)
    assert list(meter.take()) == []


# --- a real run ------------------------------------------------------------------------------


def _many_layers(num=60):
    layers = [{"name": "flat", "type": "Flatten"}]
    layers += [{"name": f"tanh{number}", "type": "Tanh"} for number in range(num)]
    return [*layers, {"name": "fc", "type": "Linear", "args": {"out_features": 10}}]


@pytest.mark.long
def test_a_job_whose_watching_costs_much_settles_and_says_so(digits, tmp_path):
    """Sixty tiny layers, each watched at each step: far more than three percent."""
    everything = {"layers": ["*"], "kinds": ["output", "output_grad"], "every": 1}
    job = spec(network={"layers": _many_layers()}, stop={"steps": 400})
    records = run(tmp_path / "watched", {**job, "probes": [everything]}, digits)
    (first, *_) = told = of_type(records, "adjusted")
    assert (first["what"], first["probe"], first["by"]) == ("probe 0.every", "0", "max_overhead")
    assert first["from"] == 1
    assert first["to"] > 1
    assert first["step"] <= 50
    assert len(told) <= 8, "it flaps"
    last = of_type(records, "overhead")[-1]
    assert last["budget"] == 0.03
    assert 0 < last["fraction"] <= 0.2  # ungoverned it is above 1; the machine may be busy
    assert last["probes"]["0"] > 0
    seen = [item["step"] for item in of_type(records, "stats")]
    assert seen[:10] == [*range(10)]
    assert len(seen) < 100
    late = [step for step in seen if step >= told[-1]["step"]]
    assert all(step % told[-1]["to"] == 0 for step in late)
    assert losses(records) == losses(run(tmp_path / "plain", job, digits))


def test_what_was_measured_before_a_probe_changed_moves_nothing_after_it():
    before, after = watch("p", every=64), watch("p", every=64, max_overhead=None)
    told: list = []
    governor = Governor(told.append)
    governor.keep([before])
    governor.keep([after])  # and the steps below were on their way
    for step in range(0, 64 * MIN_FIRST, 64):
        governor.take(MeasuredStep(step, 1e-3, {before: 1.0}), step)
    governor.take(MeasuredStep(700, 1e-3, {after: 0.5e-3}), 700)
    governor.report()
    assert [record["type"] for record in told] == ["overhead"]
    assert told[0]["fraction"] == pytest.approx(0.5 / 64, rel=0.01)


def test_the_last_sample_changes_no_interval():
    """The last checkpoint exists by then: a run that resumes from it would watch as before."""
    one = watch("p", every=1)
    told: list = []
    governor = Governor(told.append)
    governor.keep([one])
    for step in range(3 * MIN_FIRST):
        governor.take(MeasuredStep(step, 1e-3, {one: 1.0}), None)
    assert one.every == 1
    governor.take(MeasuredStep(step + 1, 1e-3, {one: 1.0}), step + 1)
    governor.report()
    assert [record["type"] for record in told] == ["adjusted", "overhead"]
    assert one.every == told[0]["to"] == told[1]["every"]["p"] > 1


def test_what_is_decided_before_one_step_is_a_chain_of_which_the_last_holds():
    """The costs of several steps are read together, before a later step: each may change."""
    one, told = watch("p", every=1), list[Any]()
    governor = Governor(told.append)
    governor.keep([one])
    for step in range(40 * MIN_FIRST):
        cost = 0.01 if step < 2 * MIN_FIRST else 1.0
        governor.take(MeasuredStep(step, 1e-3, {one: cost}), 500)
    changes = [record for record in told if record["type"] == "adjusted"]
    assert len(changes) > 1
    assert {change["step"] for change in changes} == {500}
    assert [change["from"] for change in changes] == [1, *(c["to"] for c in changes[:-1])]
    assert one.every == changes[-1]["to"]


def test_what_is_lossless_is_never_widened():
    body = {"layers": ("fc",), "kinds": ("output",), "every": 1, "want": ("full",)}
    plain, lossless = ActiveProbe(0, Probe(**body)), ActiveProbe(1, Probe(**body, lossless=True))
    governor = Governor(lambda _: None)
    governor.keep([plain, lossless])
    for step in range(60):
        governor.take(MeasuredStep(step, 1.0, {plain: 0.2, lossless: 0.5}), step)
    assert (lossless.factor, plain.factor > 1) == (1, True)
    with pytest.raises(ValidationError, match=r"max_overhead .* has no effect with lossless"):
        Probe(**body, lossless=True, max_overhead=0.1)
