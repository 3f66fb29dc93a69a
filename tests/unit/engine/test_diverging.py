"""Trainings that diverge, against plain torch: every finding says where, and the advice fits."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.engine.runs import of_type, spec, write_table
from tests.unit.engine.test_guarding import findings, run

ROWS, BATCH, STEPS, SEED = 96, 8, 12, 3


class Function(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = getattr(torch, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def linear(name: str, size: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "Linear", "args": {"out_features": size}, **more}


def layers(middle: str) -> list[dict[str, Any]]:
    return [
        linear("a", 8, inputs=["x"]),
        {"name": "middle", "type": middle},
        linear("b", 2),
    ]


def module(middle: str) -> nn.Sequential:
    made = nn.ReLU() if middle == "ReLU" else Function(middle)
    return nn.Sequential(nn.Linear(4, 8), made, nn.Linear(8, 2))


def columns(scale: float = 1.0, bad: dict[int, float] | None = None) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    x = (scale * generator.normal(size=(ROWS, 4))).astype(np.float32)
    for row, value in (bad or {}).items():
        x[row, 1] = value
    return {"x": x, "y": generator.normal(size=(ROWS, 2)).astype(np.float32)}


def is_finite(tensors: Any) -> bool:
    return all(bool(torch.isfinite(item).all()) for item in tensors if item is not None)


def by_torch(
    data: dict[str, np.ndarray], middle: str, optimizer: str, lr: float
) -> tuple[int, str] | None:
    """The first step with a value that is not finite, and in which of its phases; None: none."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    network = module(middle)
    made = getattr(torch.optim, optimizer)(network.parameters(), lr=lr)
    for step in range(STEPS):
        if not is_finite(network.parameters()):
            return step - 1, "update"
        rows = slice(step * BATCH, (step + 1) * BATCH)
        x, y = (torch.from_numpy(data[name][rows]) for name in ("x", "y"))
        values = [x]
        for layer in network:
            values.append(layer(values[-1]))
            values[-1].retain_grad()
        loss = nn.functional.mse_loss(values[-1], y)
        loss.backward()
        if not is_finite([*values, loss]):
            return step, "forward"
        if not is_finite([*(v.grad for v in values), *(p.grad for p in network.parameters())]):
            return step, "backward"
        made.step()
        made.zero_grad()
    return None


def job(middle: str, optimizer: str, lr: float, action: str) -> dict[str, Any]:
    body = spec(
        network={"layers": layers(middle)},
        seed=SEED,
        loss={"type": "MSELoss", "inputs": ["b", "y"]},
        optimizer={"type": optimizer, "args": {"lr": lr}},
        stop={"steps": STEPS},
        guards={"nonfinite": {"check": ["loss", "gradients"], "action": action}},
    )
    body["data"] = {
        "train": {"dataset": "ds_1", "split": "train"},
        "fields": {"x": {"type": "dense", "fill": "NaN"}, "y": {"type": "dense"}},
        "batch_size": BATCH,
        "shuffle": {"enabled": False},
    }
    return body


def check(found: dict[str, Any]) -> None:
    """It says where: step, layer, tensor, phase and rows."""
    step = found["step"]
    assert None not in {found[key] for key in ("layer", "tensor", "kind", "phase")}, found
    assert found["samples"] == [*range(step * BATCH, (step + 1) * BATCH)]
    assert {*found["bad_samples"]} <= {*found["samples"]}
    assert found["causes"]
    has_rows = found["kind"] in ("input", "output", "output_grad") and found["layer"] != "loss"
    assert bool(found["bad_samples"]) == has_rows


MIDDLES = ("ReLU", "square", "exp", "log")
RATES = [("SGD", 10.0**k) for k in (1, 2, 3, 4, 5, 7, 9, 12, 18, 30, 38)]
RATES += [("SGD", 3e38)]
RATES += [("Adam", 10.0**k) for k in (2, 5, 8, 10, 15)]
CASES = [(middle, *rate) for middle, rate in itertools.product(MIDDLES, RATES)]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("plain"), columns(), {"train": slice(None)})


@pytest.mark.parametrize(("middle", "optimizer", "lr"), CASES)
@pytest.mark.long
def test_the_first_value_that_is_nan_or_inf_is_found_where_torch_has_it(
    middle: str, optimizer: str, lr: float, table: Path, tmp_path: Path
):
    records = run(tmp_path, job(middle, optimizer, lr, "warn"), table)
    assert records[-1]["state"] == "succeeded"
    told = findings(records)
    for found in told:
        check(found)
    first = by_torch(columns(), middle, optimizer, lr)
    named = [(item["step"], item["phase"]) for item in told if is_of_value(item)]
    assert named[:1] == ([] if first is None else [first])
    overflows = [item for item in told if not is_of_value(item)]
    assert all(item["checks"] == ["gradients"] for item in overflows)
    steps = [item["step"] for item in overflows]
    assert all(after - before > 1 for before, after in itertools.pairwise(steps)), "told of twice"


def is_of_value(found: dict[str, Any]) -> bool:
    """Whether a value is not finite, and not only the norm of such that are."""
    *_, nan, inf = found["tensors"]["rows"][-1]
    return bool(nan or inf)


def test_these_cases_are_of_values_of_updates_and_of_norms(table: Path, tmp_path: Path):
    phases = {by_torch(columns(), *case) for case in CASES}
    assert {item[1] for item in phases if item} == {"forward", "update"}
    assert None in phases
    # the case of the review: finite gradients of more than 1e19, and a NaN a step later
    records = run(tmp_path, job("square", "SGD", 1e4, "warn"), table)
    norm, value = findings(records)
    assert (norm["checks"], norm["phase"], norm["kind"]) == (
        ["gradients"],
        "backward",
        "param_grad",
    )
    assert value["step"] == norm["step"] + 1
    assert "overflows float32" in norm["message"]


@pytest.mark.parametrize(("middle", "optimizer", "lr"), CASES[::3])
def test_the_error_of_a_job_that_fails_is_its_finding(
    middle: str, optimizer: str, lr: float, table: Path, tmp_path: Path
):
    records = run(tmp_path, job(middle, optimizer, lr, "fail"), table)
    told = findings(records)
    if not told:
        assert records[-1]["state"] == "succeeded"
        return
    (found,) = told
    check(found)
    error = records[-1]["error"]
    assert error["code"] == "non_finite"
    assert error["hint"] == found["causes"][0]
    assert error["layer"] == found["layer"]
    keys = ("step", "layer", "kind", "phase", "samples", "bad_samples")
    assert {key: error["nonfinite"][key] for key in keys} == {key: found[key] for key in keys}


@pytest.mark.parametrize("action", ["fail", "skip_step"])
@pytest.mark.parametrize("value", [1e30, 1e20, math.inf, math.nan])
def test_the_hint_is_about_the_row_that_caused_it(action: str, value: float, tmp_path: Path):
    data = columns(bad={BATCH * 5 + 2: value})
    table = write_table(tmp_path / "table", data, {"train": slice(None)})
    body = job("square", "SGD", 1e-3, action)
    body["guards"]["nonfinite"] |= {"max_skipped": 0} if action == "skip_step" else {}
    if action == "skip_step":
        body["guards"]["nonfinite"]["max_skipped"] = 1
        data["x"][BATCH * 6 + 1, 1] = value
        write_table(tmp_path / "table", data, {"train": slice(None)})
    records = run(tmp_path / "job", body, table)
    found = findings(records)[0]
    error = records[-1]["error"]
    assert (found["step"], found["bad_samples"]) == (5, [BATCH * 5 + 2])
    assert error["hint"] == findings(records)[-1]["causes"][0]
    assert "learning rate" not in error["hint"]
    if math.isfinite(value):
        assert error["hint"] == f"The field 'x' reaches {value:.3g}: scale or normalize it."


def test_a_field_is_the_cause_even_if_the_first_bad_tensor_comes_much_later(tmp_path: Path):
    data = columns(bad={BATCH * 5 + 2: 1e30})
    table = write_table(tmp_path / "table", data, {"train": slice(None)})
    body = job("square", "SGD", 1e-3, "fail")
    deep = [{"name": f"deep{number}", "type": "Identity"} for number in range(25)]
    body["network"] = {"layers": [{**deep[0], "inputs": ["x"]}, *deep[1:], *layers("square")]}
    body["network"]["layers"][25] |= {"inputs": ["deep24"]}
    records = run(tmp_path / "job", body, table)
    (found,) = findings(records)
    assert (found["step"], found["phase"]) == (5, "forward")
    assert len(found["tensors"]["rows"]) == 20
    assert "x" not in {row[0] for row in found["tensors"]["rows"]}
    assert HINT_OF_ROW in found["causes"]
    assert records[-1]["error"]["hint"] == found["causes"][0]


def test_parameters_that_an_update_made_bad_are_reported_with_the_rows_of_that_step(
    table: Path, tmp_path: Path
):
    body = job("square", "SGD", 1e30, "warn")
    body["guards"]["nonfinite"]["check"] = ["parameters"]
    (found, *_) = findings(run(tmp_path, body, table))
    check(found)
    assert found["phase"] == "update"


def test_a_loss_that_refuses_such_numbers_ends_the_job_with_the_advice_of_the_finding(
    tmp_path: Path,
):
    """The layer that fails is not asked before: the guard has found the cause a step earlier."""
    data = columns(bad={BATCH * 5 + 2: 1e30})
    data["y"] = (data["y"] > 0).astype(np.float32)
    table = write_table(tmp_path / "table", data, {"train": slice(None)})
    body = job("square", "SGD", 1e-3, "warn")
    body["network"] = {"layers": [*layers("square"), {"name": "p", "type": "Sigmoid"}]}
    body["loss"] = {"type": "BCELoss", "inputs": ["p", "y"]}
    records = run(tmp_path / "job", body, table)
    error = records[-1]["error"]
    assert error["code"] == "non_finite"
    told = findings(records)
    assert error["hint"] == (told[0]["causes"][0] if told else HINT_OF_ROW)
    assert of_type(records, "end")


HINT_OF_ROW = "The field 'x' reaches 1e+30: scale or normalize it."
