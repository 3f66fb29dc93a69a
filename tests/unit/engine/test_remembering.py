"""What probes remember over a restart."""

import json
from typing import Any

import pytest

from engine.metrics.derived import FORMULAS
from engine.probes.flight_recorder import FlightRecorder
from engine.probes.hooks import StepWatcher
from engine.probes.probe_set import made
from engine.probes.watched.probe import ActiveProbe
from glasshouse.spec import Probe
from tests.unit.engine.runs import of_type, run, spec

NAN = [float("nan"), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4, 0]
FINITE = [1.5, 0.5, 1.0, 2.0, 3.0, 2.0, 0.25, 0, 0]


def _probe(**changes: Any) -> Probe:
    whole = {"layers": ["fc"], "kinds": ["output"], "every": 2} | changes
    return Probe.model_validate_json(json.dumps(whole))


def _again(watch: ActiveProbe) -> dict[str, Any]:
    """The state as it comes back from a file."""
    return json.loads(json.dumps(watch.state()))


def _record(step: int) -> dict[str, Any]:
    return {"type": "stats", "at": "2026-01-01T00:00:00Z", "step": step, "phase": "train"}


def test_a_widened_interval_stays_wide():
    before, after = made(0, _probe()), made(0, _probe())
    before.factor, before.num_failures = 8, 2
    after.restore(_again(before), {})
    assert (after.every, after.num_failures) == (16, 2)


def test_a_probe_that_was_changed_since_begins_anew():
    before, after = made("prb_1", _probe()), made("prb_1", _probe(every=5))
    before.factor, before.num_failures = 8, 2
    after.restore(_again(before), {})
    assert (after.every, after.num_failures) == (5, 0)


def test_what_was_off_stays_off_over_a_restart_and_what_is_new_looks(
    digits, tmp_path, monkeypatch, capfd
):
    """A probe and a metric that fail three times are off; what the job says besides is done."""
    monkeypatch.setattr(StepWatcher, "_see", _fail)
    monkeypatch.setitem(FORMULAS, "l2", _fail)
    watch = {"layers": ["fc"], "kinds": ["output"], "every": 1, "max_overhead": None}
    metric = {"type": "l2", "inputs": ["fc"]}
    each = {"every_steps": 1}
    first = run(tmp_path / "a", spec(probes=[watch], metrics=[metric], checkpoint=each), digits)
    assert sum("is off" in record["what"] for record in of_type(first, "dropped")) == 2
    there = {"dir": str(tmp_path / "a" / "checkpoints" / "step-5"), "step": 5}
    monkeypatch.undo()
    more = {"probes": [watch, watch], "metrics": [metric, {**metric, "name": "new"}]}
    records = run(tmp_path / "b", spec(**more), digits, resume=there)
    values = [r["values"] for r in of_type(records, "metrics") if "loss" in r["values"]]
    assert all("new" in item and "l2(fc)" not in item for item in values)
    assert [record["step"] for record in of_type(records, "stats")] == [5, 6, 7, 8, 9]
    capfd.readouterr()


def _fail(*_args: Any) -> Any:
    raise ValueError("it cannot be seen")


@pytest.mark.parametrize("layer", ["fc", "NaN"])
def test_a_recorder_gives_the_steps_from_before_the_restart(layer: str):
    def recorder() -> FlightRecorder:
        found = made(0, _probe(on="nonfinite", every=None))
        assert isinstance(found, FlightRecorder)
        return found

    def steps(one: FlightRecorder, first: int, last: int) -> None:
        for step in range(first, last):
            row = [layer, "output", *[value + step for value in FINITE[:7]], 0, 0]
            assert one.take(_record(step), [row], 1.0, set()) == []

    bad = [layer, "output", *NAN]
    uninterrupted, before, after = recorder(), recorder(), recorder()
    steps(uninterrupted, 0, 30)
    steps(before, 0, 25)
    after.restore(_again(before), {})
    steps(after, 25, 30)
    expected = uninterrupted.take(_record(30), [bad], 1.0, set())
    assert len(expected) == 21
    assert repr(after.take(_record(30), [bad], 1.0, set())) == repr(expected)
    # it has spoken, and does not speak again before a finite step: nor after a restart
    later = recorder()
    later.restore(_again(after), {})
    assert later.take(_record(31), [bad], 1.0, set()) == []


def test_what_one_recorder_has_reported_another_does_not_report_again_after_a_restart():
    before = [made(number, _probe(on="nonfinite", every=None)) for number in (0, 1)]
    after = [made(number, _probe(on="nonfinite", every=None)) for number in (0, 1)]
    told: set[tuple[str, str]] = set()
    for one in before:
        assert isinstance(one, FlightRecorder)
        one.take(_record(0), [["fc", "output", *FINITE]], 1.0, told)
    shared: dict[int, set[tuple[str, str]]] = {}
    for saved, one in zip(before, after, strict=True):
        one.restore(_again(saved), shared)
    said: list[dict[str, Any]] = []
    told = set()
    for one in after:
        assert isinstance(one, FlightRecorder)
        said += one.take(_record(1), [["fc", "output", *NAN]], 1.0, told)
    assert [record["step"] for record in said] == [0, 1]
