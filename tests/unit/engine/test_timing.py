import timeit

import pytest

from engine.core.timing import PARTS, DeviceClock, HostClock, Laps, Timing, Work, figures_of
from tests.unit.engine import ragged
from tests.unit.engine.runs import DIGITS_META, of_type, planned, run, spec, write_job


class Device:
    """A device's queue whose time the test moves: events pass when it has come so far."""

    def __init__(self) -> None:
        self.queued_ms = 0.0
        self.reached_ms = 0.0
        self.made = 0

    def event(self) -> "Event":
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = self.device.queued_ms

    def query(self) -> bool:
        assert self.at_ms is not None
        return self.at_ms <= self.device.reached_ms

    def synchronize(self) -> None:
        self.device.reached_ms = max(self.device.reached_ms, self.at_ms or 0.0)

    def elapsed_time(self, other: "Event") -> float:
        assert self.query(), "read before it has passed"
        assert other.query(), "read before it has passed"
        return other.at_ms - self.at_ms


def _step(device: Device, clock: DeviceClock, rows: int = 4) -> None:
    for part, ms in [("data", 1), ("forward", 2), ("backward", 4), ("optimizer", 8)]:
        device.queued_ms += ms
        clock.mark(part)
    clock.end_step(rows, 3 * rows)


def test_events_of_the_device_are_counted_once_they_have_passed_and_never_waited_for():
    device = Device()
    clock = DeviceClock(device.event)
    _step(device, clock)
    _step(device, clock)
    assert clock.take()["num_steps"] == 0
    device.reached_ms = 18  # the first step, and data and forward of the second
    laps = clock.take()
    assert (laps["num_steps"], laps["num_rows"], laps["num_tokens"]) == (1, 4, 12)
    assert laps["forward"] == 4e6
    assert laps["backward"] == 4e6
    rest = clock.take(wait=True)
    assert (rest["num_steps"], rest["num_rows"]) == (1, 4)
    assert rest["backward"] == 4e6
    assert rest["optimizer"] == 8e6


def test_events_of_the_device_are_used_again():
    device = Device()
    clock = DeviceClock(device.event)
    for _ in range(50):
        _step(device, clock)
        device.reached_ms = device.queued_ms
        clock.take()
    assert device.made < 15


def test_what_a_hook_takes_on_the_device_is_not_the_forward_pass():
    device = Device()
    clock = DeviceClock(device.event)
    end = lambda: clock.resume("probes")  # noqa: E731
    for ms, act in [(2, clock.pause), (1, clock.pause), (3, end), (1, end)] * 2:
        device.queued_ms += ms
        act()
    device.queued_ms += 3
    clock.mark("forward")
    laps = clock.take(wait=True)
    assert laps["probes"] == 10e6
    assert laps["forward"] == 7e6


def test_what_a_hook_takes_on_the_host_is_not_the_forward_pass():
    clock = HostClock()
    clock.mark("data")
    clock.pause()
    clock.pause()
    _spin(0.03)
    clock.resume("probes")
    clock.resume("probes")
    clock.mark("forward")
    laps = clock.take()
    assert laps["probes"] >= 30e6
    assert laps["forward"] < 15e6


def _spin(seconds: float) -> None:
    began = timeit.default_timer()
    while timeit.default_timer() - began < seconds:
        pass


def test_figures_are_means_per_step_and_rates_per_second():
    laps = Laps(float, num_steps=4, num_rows=100, forward=1e9, backward=2e9, report=1e9)
    figures = figures_of(laps, Work(flops_per_row=10.0, peak_flops=1000.0))
    assert figures["time/forward"] == 0.25
    assert figures["time/data"] == 0
    assert figures["time/step"] == 1.0
    assert figures["throughput/samples_per_s"] == 25
    assert figures["throughput/flops_per_s"] == 3 * 10 * 25
    assert figures["throughput/flops_fraction"] == 0.75
    assert "throughput/flops_per_s" not in figures_of(laps, Work())
    assert "throughput/flops_fraction" not in figures_of(laps, Work(flops_per_row=10.0))


def test_what_comes_after_the_last_step_is_reported_with_the_steps_before_it():
    clock = HostClock()
    timing = Timing(clock, Work())
    clock.mark("forward")
    clock.end_step(1)
    first = timing.figures(0)
    assert timing.figures(1) == {}
    _spin(0.02)
    clock.mark("evaluate")
    again = timing.figures(0, last=True)
    assert again["time/evaluate"] >= 0.02
    assert again["time/forward"] == first["time/forward"]
    assert timing.figures(0) == again
    assert Timing(HostClock(), Work()).figures(0, last=True) == {}


def test_the_parts_of_a_step_sum_up_to_it(digits, tmp_path):
    data = {"validation": {"dataset": "ds_1", "split": "test"}}
    probes = [{"layers": ["*"], "kinds": ["output", "param_grad"], "every": 2}]
    job = spec(data=data, evaluate={"every_epochs": 1}, stop={"epochs": 20}, probes=probes)
    job["metrics"] = [{"type": "l2", "inputs": ["conv1"]}]
    records = run(tmp_path, job, digits)
    told = [r for r in of_type(records, "metrics") if "time/step" in r["values"]]
    assert told
    assert told[-1]["step"] == 99
    for record in told:
        values = record["values"]
        parts = [values[f"time/{part}"] for part in PARTS]
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= values["time/step"] * 1.000001
        assert sum(parts) >= values["time/step"] * 0.5  # the rest is reporting
    last = told[-1]["values"]
    assert min(last[f"time/{part}"] for part in PARTS) > 0
    assert last["throughput/samples_per_s"] > 0
    assert "throughput/flops_per_s" not in last  # nobody has told the rank its plan


def test_the_rate_of_operations_is_three_times_that_of_the_forward_pass(digits, tmp_path):
    from engine.core.spool import read_frames
    from engine.process import rank

    plan = planned(spec(), DIGITS_META)
    device = {"type": "cpu", "threads": 1, "peak_flops": 1e12}
    job = write_job(tmp_path, plan["spec"], digits, flops=plan["flops"], device=device)
    assert rank.main(job) == 0
    records, _ = read_frames(job / "spool", 0, 10**6)
    values = next(r["values"] for r in records if "time/step" in r.get("values", {}))
    flops = 3 * plan["flops"] / 64 * values["throughput/samples_per_s"]
    assert values["throughput/flops_per_s"] == pytest.approx(flops)
    assert values["throughput/flops_fraction"] == pytest.approx(flops / 1e12)


def test_the_tokens_of_a_second_are_the_steps_of_its_rows_without_padding(digits, tmp_path):
    """Every step has all rows, so any set of reported steps has the same mean."""
    job = ragged.job(data={"batch_size": len(ragged.TEXTS)})
    for record in of_type(run(tmp_path, job, ragged.texts(tmp_path / "data")), "metrics"):
        values = record["values"]
        if "time/step" in values:
            each = values["throughput/tokens_per_s"] / values["throughput/samples_per_s"]
            mean = sum(map(len, ragged.TEXTS)) / len(ragged.TEXTS)
            assert each == pytest.approx(mean)
            break
    else:
        pytest.fail("no time was reported")
    told = of_type(run(tmp_path / "images", spec(), digits), "metrics")
    assert not [name for record in told for name in record["values"] if "tokens" in name]


def test_the_time_of_the_data_is_attributed_to_the_data(digits, tmp_path, monkeypatch):
    from engine.data.batches.rows import MemoryRows

    batch = MemoryRows.batch
    monkeypatch.setattr(MemoryRows, "batch", lambda *args: (_spin(0.02), batch(*args))[1])
    records = run(tmp_path, spec(), digits)
    values = next(r["values"] for r in records if "time/step" in r.get("values", {}))
    assert 0.02 <= values["time/data"] <= values["time/step"]


def test_the_time_that_hooks_take_is_that_of_the_probes(digits, tmp_path, monkeypatch):
    from engine.probes.hooks import StepWatcher

    count = StepWatcher._count
    monkeypatch.setattr(StepWatcher, "_count", lambda *given: (_spin(0.02), count(*given))[1])
    probes = [{"layers": ["conv1"], "kinds": ["output", "output_grad"], "every": 1}]
    records = run(tmp_path, spec(probes=probes, stop={"steps": 5}), digits)
    values = next(r["values"] for r in records if "time/step" in r.get("values", {}))
    assert 0.04 <= values["time/probes"] <= values["time/step"]
    assert values["time/forward"] + values["time/probes"] <= values["time/step"]


def test_the_time_that_derived_series_take_is_their_own(digits, tmp_path, monkeypatch):
    from engine.metrics import derived

    copied = derived._copy
    monkeypatch.setattr(derived, "_copy", lambda tensor: (_spin(0.02), copied(tensor))[1])
    seen = ["conv1", "conv1/output_grad", "fc.weight/param", "fc.weight/update"]
    metrics = [{"type": "l2", "inputs": [name], "name": f"n{i}"} for i, name in enumerate(seen)]
    records = run(tmp_path, spec(metrics=metrics, stop={"steps": 5}), digits)
    values = [r["values"] for r in records if "time/step" in r.get("values", {})]
    for told in values:
        assert 0.08 <= told["time/derived"] <= told["time/step"]
        rest = ("forward", "backward", "optimizer", "probes")
        assert sum(told[f"time/{part}"] for part in rest) < told["time/step"] - 0.08
