"""Early stopping."""

from typing import Any

import pytest

from engine.training.schedule import EarlyStop
from glasshouse.spec import Early
from tests.unit.engine.runs import errors, losses, of_type, run, spec
from tests.unit.engine.test_commands import train

JUDGED: dict[str, Any] = {
    "data": {**spec()["data"], "validation": {"dataset": "ds_1", "split": "test"}},
    "evaluate": {"every_steps": 2},
}
EARLY = {"metric": "validation/loss", "mode": "min", "patience": 3}
STUCK = {"type": "SGD", "args": {"lr": 0.0}}
NAN = float("nan")


@pytest.mark.parametrize(
    ("mode", "min_delta", "values", "ends_at"),
    [
        ("min", 0.0, [3, 2, 2, 2], 3),
        ("min", 0.0, [3, 2, 2, 1.9, 1.9, 2.5], 5),
        ("min", 0.5, [3, 2.6, 2.6], 2),
        ("max", 0.0, [1, 2, 1, 3, 3, 3], 5),
        ("min", 0.0, [NAN, NAN], 1),
        ("min", 0.0, [NAN, 1, NAN, NAN], 3),
        ("min", 0.0, [3, 2, 1, 0, -1], None),
        ("max", 0.0, [float("-inf"), 1, float("inf"), 2, 2], 4),
    ],
)
def test_training_ends_after_patience_values_without_improvement(mode, min_delta, values, ends_at):
    spec = Early(metric="validation/loss", mode=mode, patience=2, min_delta=min_delta)
    early = EarlyStop(spec)
    over: list[bool] = []
    for number, value in enumerate(values):
        again = EarlyStop(spec)
        again.restore(early.state())  # the state of a resumed run
        early = again
        early.judge(float(value), number)
        over.append(early.is_over)
    expected = [ends_at is not None and number >= ends_at for number in range(len(values))]
    assert over == expected


def test_training_ends_and_says_why(digits, tmp_path):
    stop = {"epochs": 50, "early": EARLY}
    records = run(tmp_path, spec(**JUDGED, optimizer=STUCK, stop=stop), digits)
    assert len(losses(records)) == 8  # evaluations after steps 1, 3, 5 and 7: the first is the best
    end = records[-1]
    assert end["state"] == "succeeded"
    assert "validation/loss was not better for 3 evaluations" in end["reason"]
    assert "at step 1" in end["reason"]
    judged = [r for r in of_type(records, "metrics") if "validation/loss" in r["values"]]
    assert [r["step"] for r in judged] == [1, 3, 5, 7]  # the last one is not made twice
    assert of_type(records, "checkpoint")[-1]["final"]


def test_a_job_that_had_ended_early_does_not_continue(digits, tmp_path):
    job = spec(**JUDGED, optimizer=STUCK, stop={"epochs": 50, "early": EARLY})
    run(tmp_path / "a", job, digits)
    there = {"dir": str(tmp_path / "a/checkpoints/step-8"), "step": 8}
    again = run(tmp_path / "b", job, digits, resume=there)
    assert losses(again) == []
    assert "early stop" in again[-1]["reason"]


def test_an_evaluation_that_was_asked_for_does_not_count(digits, tmp_path):
    asked = {at: [{"id": f"cmd_{at}", "do": "evaluate"}] for at in (3, 5)}
    stop = {"steps": 9, "early": EARLY}
    _, records = train(tmp_path, digits, asked, **JUDGED, optimizer=STUCK, stop=stop)
    judged = [r["step"] for r in of_type(records, "metrics") if "validation/loss" in r["values"]]
    assert judged == [1, 2, 3, 4, 5, 7]


def test_patience_can_be_changed_while_it_runs(digits, tmp_path):
    order = {"id": "cmd_1", "set": {"stop.early.patience": 1}}
    stop = {"steps": 30, "early": EARLY}
    _, records = train(tmp_path, digits, {4: [order]}, **JUDGED, optimizer=STUCK, stop=stop)
    assert len(losses(records)) == 4
    [told] = of_type(records, "command")
    assert (told["old"], told["new"]) == ({"stop.early.patience": 3}, {"stop.early.patience": 1})


def test_what_cannot_be_judged_is_refused():
    alone = errors(spec(stop={"steps": 5, "early": EARLY}))
    assert "set data.validation and evaluate" in alone["/stop/early"]
    unknown = EARLY | {"metric": "validation/accuracy"}
    found = errors(spec(**JUDGED, stop={"steps": 5, "early": unknown}))
    assert "validation/loss" in found["/stop/early/metric"]
    own = EARLY | {"metric": "loss"}
    assert "/stop/early/metric" in errors(spec(**JUDGED, stop={"steps": 5, "early": own}))
