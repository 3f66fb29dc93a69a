"""The flight recorder: silent until something is not finite, then the steps before it too."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from engine.probes.flight_recorder import NUM_STEPS, FlightRecorder
from glasshouse.spec import Probe
from tests.unit.engine.runs import captured, losses, of_type, run, spec, write_table

BATCH = 4
BAD = 30
AGAIN = 37
EVERY_STEP = {"layers": ["*"], "kinds": ["output"], "every": 1, "max_overhead": None}


def record_of(**changes: Any) -> dict[str, Any]:
    body = {"layers": ["*"], "kinds": ["output"], "on": "nonfinite", "max_overhead": None}
    return {**body, **changes}


@pytest.fixture
def table(tmp_path):
    """Rows in stored order, four a step: ``side`` is infinite at two steps, ``x`` never."""
    generator = np.random.default_rng(0)
    rows = BATCH * 50
    x = generator.normal(size=(rows, 3)).astype(np.float32)
    side = generator.normal(size=(rows, 2)).astype(np.float32)
    side[BATCH * BAD + 1, 0] = np.inf
    side[BATCH * AGAIN + 2, 1] = -np.inf
    target = generator.normal(size=(rows, 1)).astype(np.float32)
    columns = {"x": x, "side": side, "target": target}
    return write_table(tmp_path / "table", columns, {"train": slice(None)})


def job(*probes: dict[str, Any], target: str = "target") -> dict[str, Any]:
    fields = {name: {"type": "dense"} for name in ("x", "side", "target")}
    width = 1 if target == "target" else 2
    layers = [
        {"name": "look", "type": "Identity", "inputs": ["side"]},
        {"name": "hidden", "type": "Linear", "args": {"out_features": 5}, "inputs": ["x"]},
        {"name": "relu", "type": "ReLU", "args": {"inplace": True}},
        {"name": "fc", "type": "Linear", "args": {"out_features": width}},
    ]
    whole = spec(
        network={"layers": layers},
        loss={"type": "MSELoss", "inputs": ["fc", target]},
        optimizer={"type": "SGD", "args": {"lr": 0.01}},
        stop={"epochs": 1},
        probes=list(probes),
    )
    whole["data"] |= {"fields": fields, "batch_size": BATCH, "shuffle": {"enabled": False}}
    return whole


def reported_steps(records, phase="train"):
    return [item["step"] for item in of_type(records, "stats") if item["phase"] == phase]


def test_the_last_twenty_steps_come_with_the_first_bad_one_and_a_finite_step_arms_again(
    table, tmp_path
):
    records = run(tmp_path / "a", job(record_of()), table)
    first = [*range(BAD - NUM_STEPS, BAD + 1)]
    assert NUM_STEPS == 20
    assert reported_steps(records) == [*first, *range(BAD + 1, AGAIN + 1)]
    whole = run(tmp_path / "b", job(EVERY_STEP), table)
    rows = {item["step"]: item["rows"] for item in of_type(whole, "stats")}
    for item in of_type(records, "stats"):
        assert item["rows"] == rows[item["step"]], "not what an ordinary probe has seen"
    bad = next(item for item in of_type(records, "stats") if item["step"] == BAD)
    assert [row[-1] for row in bad["rows"] if row[0] == "look"] == [1.0]
    assert losses(records) == losses(whole)


def test_nothing_comes_while_all_is_finite(table, tmp_path):
    records = run(tmp_path / "a", job(record_of(layers=["hidden", "fc"])), table)
    assert reported_steps(records) == []
    assert not of_type(records, "captures")


def test_what_another_probe_has_reported_is_not_reported_again(table, tmp_path):
    other = {**EVERY_STEP, "layers": ["fc"], "every": 2}
    records = run(tmp_path / "a", job(record_of(), other), table)
    seen: list[tuple[int, str]] = [
        (item["step"], row[0]) for item in of_type(records, "stats") for row in item["rows"]
    ]
    assert len(seen) == len(set(seen))
    assert {layer for step, layer in seen if step == BAD} == {"look", "hidden", "relu", "fc"}
    assert [step for step, layer in seen if layer == "hidden"] == [*range(10, AGAIN + 1)]


def test_two_recorders_report_each_row_once(table, tmp_path):
    both = (record_of(), record_of(layers=["look", "fc"]))
    records = run(tmp_path / "a", job(*both), table)
    seen = [(item["step"], row[0]) for item in of_type(records, "stats") for row in item["rows"]]
    assert len(seen) == len(set(seen)) == 4 * (NUM_STEPS + 1 + AGAIN - BAD)


@pytest.mark.parametrize("kinds", [["output"], ["output", "output_grad", "param", "param_grad"]])
def test_a_loss_that_is_nan_or_inf_is_bad_too_and_the_step_is_kept_whole(table, tmp_path, kinds):
    """The target of one step is infinite: no output is, and from the next step on all is NaN."""
    probe = record_of(layers=["hidden", "relu", "fc"], kinds=kinds, want=["stats", "full"])
    records = run(tmp_path / "a", job(probe, target="side"), table)
    assert reported_steps(records) == [*range(BAD - NUM_STEPS, BAD + 1)]
    assert losses(records)[BAD] == "Infinity"
    found = captured(records, tmp_path / "a")
    kept = {(layer, kind): item for (_, layer, kind), item in found.items()}
    assert {step for step, _, _ in found} == {BAD}
    # `relu` has written into the output of `hidden`: that one is gone, and not given falsely
    assert ("hidden", "output") not in kept
    assert kept["relu", "output"].shape == (BATCH, 5)
    assert kept["fc", "output"].isfinite().all()
    if len(kinds) > 1:
        assert not kept["fc", "output_grad"].isfinite().all()
        assert not kept["fc.weight", "param_grad"].isfinite().all()
        weight, bias = kept["fc.weight", "param"], kept["fc.bias", "param"]
        again = kept["relu", "output"] @ weight.T + bias
        assert torch.allclose(kept["fc", "output"], again, atol=1e-6)


def test_the_tensors_before_and_after_the_bad_one_are_of_its_step(table, tmp_path):
    probe = record_of(want=["stats", "full"])
    records = run(tmp_path / "a", job(probe), table)
    everything = {**EVERY_STEP, "want": ["full"]}
    whole = run(tmp_path / "b", job(everything), table)

    def tensors(found, where):
        every = captured(found, tmp_path / where)
        return {(step, layer): item for (step, layer, _), item in every.items()}

    kept, expected = tensors(records, "a"), tensors(whole, "b")
    assert kept.keys() == {
        (step, name) for step in (BAD, AGAIN) for name in ("look", "hidden", "relu", "fc")
    }
    assert all(torch.equal(value, expected[key]) for key, value in kept.items())


def test_of_the_bad_step_the_part_is_kept_that_was_asked_for(table, tmp_path):
    probe = record_of(layers=["look"], want=["stats", "full"], slice="1:3")
    records = run(tmp_path / "a", job(probe), table)
    found = of_type(records, "captures")
    assert [item["step"] for item in found] == [BAD, AGAIN]
    for item in found:
        (entry,) = item["tensors"]
        assert (entry["form"], entry["shape"]) == ("slice", [2, 2])
        assert entry["captured_from"] == [BATCH, 2]


def test_figures_that_arrive_late_keep_the_next_step_and_say_which_it_is():
    """As on CUDA: a step is known to be bad only when its tensors are gone."""
    probe = Probe(layers=("*",), kinds=("output",), on="nonfinite", want=("stats", "full"))
    recorder, kept = FlightRecorder(0, probe), []
    figures = torch.zeros(9)

    def keep(name, kind, tensor):
        kept.append((step, name))

    for step in (4, 5):
        recorder.begin()
        recorder.see(step, ("fc", "output"), torch.ones(2), figures, keep)
        recorder.release()
    row = ["fc", "output", *[0.0] * 7, 1.0, 0.0]
    good = ["fc", "output", *[0.0] * 9]
    assert recorder.take({"step": 4}, [good], 0.0, set()) == []
    assert [item["step"] for item in recorder.take({"step": 5}, [row], 0.0, set())] == [4, 5]
    for step in (6, 7):
        recorder.begin()
        recorder.see(step, ("fc", "output"), torch.ones(2), figures, keep)
    assert kept == [(6, "fc")]
    assert recorder.take({"step": 6}, [row], 0.0, set()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"every": 1}, "give only one of every, at, on"),
        ({"phase": "evaluate"}, "training"),
        ({"want": ["full"]}, "stats"),
        ({"want": ["stats", "histogram"]}, "remove histogram from want"),
        ({"on": "fire"}, "nonfinite"),
    ],
)
def test_what_a_recorder_cannot_be_is_refused(changes, said):
    body = {"layers": ["*"], "kinds": ["output"], "on": "nonfinite", **changes}
    with pytest.raises(ValidationError, match=said):
        Probe.model_validate(
            {key: tuple(v) if isinstance(v, list) else v for key, v in body.items()}
        )


def test_a_recorder_widens_its_interval_and_reports_it(digits, tmp_path):
    layers = [{"name": "flat", "type": "Flatten"}]
    layers += [{"name": f"tanh{number}", "type": "Tanh"} for number in range(40)]
    layers += [{"name": "fc", "type": "Linear", "args": {"out_features": 10}}]
    whole = spec(
        network={"layers": layers},
        stop={"steps": 60},
        probes=[record_of(kinds=["output", "output_grad"], max_overhead=0.03)],
    )
    records = run(tmp_path / "a", whole, digits)
    assert of_type(records, "adjusted")[0]["from"] == 1
    assert reported_steps(records) == []
