"""The guard over the numbers: what it finds, what it withholds, and that nothing else changes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn

from engine.core.spool import read_frames
from engine.guards.guard import SHARE, CheckInterval, norm_of
from engine.guards.update_gate import UpdateGate
from engine.process import rank
from glasshouse import jsonio
from glasshouse.errors import NonFinite
from glasshouse.events import STATS_COLUMNS, parse_event
from glasshouse.spec import NonfiniteGuard
from tests.unit.engine.runs import errors, losses, of_type, planned, spec, write_job, write_table

BATCH = 4
NUM_STEPS = 50
BAD, AGAIN = 30, 37
HIDDEN = [
    {"name": "hidden", "type": "Linear", "args": {"out_features": 5}, "inputs": ["x"]},
    {"name": "norm", "type": "BatchNorm1d"},
    {"name": "drop", "type": "Dropout", "args": {"p": 0.25}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 1}},
]
LOOK = {"name": "look", "type": "Identity", "inputs": ["side"]}


def table_of(directory: Path, **spoilt: dict[tuple[int, int], float]) -> Path:
    """Rows in stored order, four a step; of some columns some values are spoilt."""
    generator = np.random.default_rng(0)
    rows = BATCH * NUM_STEPS
    widths = {"x": 3, "side": 2, "target": 1}
    columns = {
        name: generator.normal(size=(rows, width)).astype(np.float32)
        for name, width in widths.items()
    }
    for name, changes in spoilt.items():
        for place, value in changes.items():
            columns[name][place] = value
    return write_table(directory / "table", columns, {"train": slice(None)})


@pytest.fixture
def table(tmp_path):
    """``side`` is infinite in one row of two steps."""
    return table_of(tmp_path, side={(BATCH * BAD + 1, 0): np.inf, (BATCH * AGAIN + 2, 1): -np.inf})


@pytest.fixture
def aimless(tmp_path):
    """The target is NaN in one row of two steps."""
    places = {(BATCH * BAD + 1, 0): np.nan, (BATCH * AGAIN + 2, 0): np.nan}
    return table_of(tmp_path, target=places)


def job(
    guard: dict[str, Any] | None = None,
    *,
    layers: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    whole = spec(
        network={"layers": layers or HIDDEN},
        loss={"type": "MSELoss", "inputs": ["fc", "target"]},
        optimizer={"type": "SGD", "args": {"lr": 0.01, "momentum": 0.9}},
        stop={"epochs": 1},
        **changes,
    )
    fields = {name: {"type": "dense", "fill": "NaN"} for name in ("x", "side", "target")}
    whole["data"] |= {"fields": fields, "batch_size": BATCH, "shuffle": {"enabled": False}}
    if guard is not None:
        whole["guards"] = {"nonfinite": guard}
    return whole


def run(directory: Path, body: dict[str, Any], table: Path, **more: Any) -> list[dict[str, Any]]:
    """Plan a job and run it in this process, however it ends; returns its records."""
    meta = json.loads((table / "meta.json").read_text())
    resolved = planned(body, meta)["spec"]
    assert rank.main(write_job(directory, resolved, table, **more)) == 0
    return read_frames(directory / "spool", 0, 10**6)[0]


def weights(directory: Path) -> bytes:
    (newest,) = [*(directory / "checkpoints").glob(f"step-{NUM_STEPS}")]
    whole = (newest / "model.safetensors", newest / "generators.safetensors")
    return b"".join(path.read_bytes() for path in whole)


def findings(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = of_type(records, "finding")
    for record in found:
        parse_event({"job": "job_x", "seq": 1, "attempt": 1, **record})
    return found


def test_a_layer_that_goes_bad_is_named_with_the_rows_and_not_one_bit_changes(table, tmp_path):
    layers = [LOOK, *HIDDEN]
    watching = {"check": ["loss", "outputs", "gradients"], "action": "warn"}
    records = run(tmp_path / "a", job(watching, layers=layers), table)
    plain = run(tmp_path / "b", job({"check": []}, layers=layers), table)
    first, second = findings(records)
    assert (first["step"], first["layer"], first["kind"], first["phase"]) == (
        *(BAD, "side"),
        *("input", "forward"),
    )
    assert first["samples"] == [*range(BATCH * BAD, BATCH * (BAD + 1))]
    assert (first["bad_samples"], second["bad_samples"]) == (
        [BATCH * BAD + 1],
        [BATCH * AGAIN + 2],
    )
    assert (first["checks"], first["severity"], first["action"]) == (["outputs"], "warning", "none")
    assert second["step"] == AGAIN
    assert losses(records) == losses(plain)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert not findings(plain)


def test_the_last_twenty_steps_come_with_it(table, tmp_path):
    guard = {"check": ["loss", "outputs", "gradients"], "action": "fail"}
    records = run(tmp_path / "a", job(guard, layers=[LOOK, *HIDDEN]), table)
    (found,) = findings(records)
    assert found["steps"]["columns"] == ["step", "loss", "grad_norm", "lr"]
    rows = found["steps"]["rows"]
    assert [row[0] for row in rows] == [*range(BAD - 19, BAD + 1)]
    assert [row[1] for row in rows[:-1]] == losses(records)[BAD - 19 : BAD]
    assert all(row[2] > 0 and row[3] == 0.01 for row in rows)
    assert found["tensors"]["columns"] == list(STATS_COLUMNS)
    assert [row[0] for row in found["tensors"]["rows"]] == ["x", "side"]


def test_the_mask_of_dropout_is_that_of_the_step(tmp_path):
    """Which rows are bad depends on the mask alone: the log of what dropout has made zero."""
    table = table_of(tmp_path)
    layers = [
        {"name": "ones", "type": "Linear", "args": {"out_features": 1}, "inputs": ["x"]},
        {"name": "sigmoid", "type": "sigmoid"},
        {"name": "drop", "type": "Dropout", "args": {"p": 0.01}},
        {"name": "log", "type": "log"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 1}},
    ]
    records = run(tmp_path / "a", job({"action": "skip_step"}, layers=layers), table)
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid(), nn.Dropout(0.01), nn.Linear(1, 1))
    network.train()
    dropped: dict[int, list[int]] = {}
    for step in range(NUM_STEPS):
        kept = network[2](torch.ones(BATCH, 1)).reshape(-1)
        if (kept == 0).any():
            dropped[step] = [BATCH * step + int(row) for row in (kept == 0).nonzero()]
    told = {item["step"]: item for item in findings(records)}
    assert told
    step = min(told)
    hit = "the loss and the norm of the gradients are not finite"
    assert told[step]["message"].startswith(f"Step {step}: {hit}. In the forward pass")
    first = {step: rows for step, rows in dropped.items() if step - 1 not in dropped}
    assert {step: item["bad_samples"] for step, item in told.items()} == first
    assert {item["layer"] for item in told.values()} == {"log"}


@pytest.mark.parametrize("seed", range(6))
def test_a_layer_that_fails_is_run_again_with_the_mask_of_the_step(seed: int, tmp_path):
    """The step fails whatever is dropped; which layer is the first bad one depends on the mask."""
    layers = [
        {"name": "ones", "type": "Linear", "args": {"out_features": 1}, "inputs": ["x"]},
        {"name": "sigmoid", "type": "sigmoid"},
        {"name": "drop", "type": "Dropout", "args": {"p": 0.25}},
        {"name": "of_kept", "type": "log"},
        {"name": "negative", "type": "neg", "inputs": ["sigmoid"]},
        {"name": "of_negative", "type": "log"},
    ]
    loss = {"type": "BCELoss", "inputs": ["of_negative", "sigmoid"]}
    body = job(layers=layers) | {"loss": loss, "seed": seed}
    error = run(tmp_path / "a", body, table_of(tmp_path))[-1]["error"]
    torch.manual_seed(seed)
    nn.Linear(3, 1)
    kept = nn.Dropout(0.25)(torch.ones(BATCH, 1))
    assert (error["code"], error["step"]) == ("non_finite", 0), error
    assert error["layer"] == ("of_kept" if (kept == 0).any() else "of_negative")


STEEP = [
    {
        "name": "scaled",
        "type": "Linear",
        "args": {"out_features": 2, "bias": False},
        "inputs": ["side"],
    },
    {"name": "square", "type": "mul", "inputs": ["scaled", "scaled"]},
    {"name": "root", "type": "sqrt"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 1}},
]


@pytest.fixture
def flat(tmp_path):
    """For ``STEEP``: in one row the root is of zero. It is zero, and its slope is infinite."""
    row = BATCH * BAD + 2
    return table_of(tmp_path, side={(row, 0): 0.0, (row, 1): 0.0})


def test_a_gradient_that_goes_bad_names_the_layer_and_what_gives_it_back(flat, tmp_path):
    records = run(tmp_path / "a", job({"action": "fail"}, layers=STEEP), flat)
    error = records[-1]["error"]
    assert (error["code"], error["category"]) == ("non_finite", "nonfinite")
    assert (error["layer"], error["step"]) == ("square", BAD)
    where = error["nonfinite"]
    assert (where["kind"], where["phase"], where["metric"]) == (
        *("output_grad", "backward"),
        "gradients",
    )
    assert where["bad_samples"] == [BATCH * BAD + 2]
    assert ", from 'root', was not finite" in error["message"]
    assert all(math.isfinite(loss) for loss in losses(records))
    assert len(losses(records)) == BAD + 1


def test_an_update_that_makes_parameters_bad_is_seen_after_it(flat, tmp_path):
    guard = {"check": ["parameters"], "action": "fail"}
    error = run(tmp_path / "a", job(guard, layers=STEEP), flat)[-1]["error"]
    where = error["nonfinite"]
    assert (error["step"], error["layer"]) == (BAD, "scaled")
    assert (where["kind"], where["phase"], where["metric"]) == ("param", "update", "parameters")


def test_parameters_that_were_bad_before_the_step_are_attributed_to_the_previous_step(
    flat, tmp_path
):
    (found,) = findings(run(tmp_path / "a", job({"check": ["loss"]}, layers=STEEP), flat))
    assert (found["step"], found["layer"]) == (BAD, "scaled")
    assert (found["kind"], found["phase"]) == ("param", "update")
    assert "The update of an earlier step" in found["message"]


def by_hand(table: Path, *, skips: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch: a step whose loss is not finite changes nothing."""
    columns = [torch.from_numpy(np.load(table / "train" / f"{n}.npy")) for n in (0, 2)]
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.25), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    told: list[float] = []
    for step in range(NUM_STEPS):
        x, target = (item[step * BATCH : (step + 1) * BATCH] for item in columns)
        before = [item.clone() for item in network.buffers()]
        loss = nn.functional.mse_loss(network(x), target)
        told.append(loss.item())
        if skips and not math.isfinite(told[-1]):
            for item, was in zip(network.buffers(), before, strict=True):
                item.copy_(was)
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    names = {"0": "hidden", "1": "norm", "3": "fc"}
    return told, {f"{names[k[0]]}{k[1:]}": v for k, v in network.state_dict().items()}


def same(mine: list[Any], theirs: list[float]) -> bool:
    return np.array_equal([*map(jsonio.number, mine)], theirs, equal_nan=True)


def model_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "checkpoints" / f"step-{NUM_STEPS}" / "model.safetensors")


def test_a_skipped_step_changes_nothing_and_the_rest_is_torchs(aimless, tmp_path):
    records = run(tmp_path / "a", job({"action": "skip_step"}), aimless)
    assert records[-1]["state"] == "succeeded"
    told, state = by_hand(aimless, skips=True)
    assert same(losses(records), told)
    assert [step for step, loss in enumerate(told) if math.isnan(loss)] == [BAD, AGAIN]
    saved = model_of(tmp_path / "a")
    assert saved.keys() == state.keys()
    for name, item in state.items():
        assert torch.equal(saved[name], item), name
    counted = [
        (item["step"], item["values"]["skipped_steps"])
        for item in of_type(records, "metrics")
        if "skipped_steps" in item["values"]
    ]
    assert counted == [(BAD, 1), (AGAIN, 2)]
    assert [item["action"] for item in findings(records)] == ["skipped", "skipped"]


def test_a_bad_batch_leaves_no_trace_in_batch_normalization(tmp_path):
    table = table_of(tmp_path, x={(BATCH * BAD, 1): np.nan})
    run(tmp_path / "a", job({"action": "skip_step"}), table)
    saved = model_of(tmp_path / "a")
    assert all(bool(torch.isfinite(item).all()) for item in saved.values())
    assert int(saved["norm.num_batches_tracked"]) == NUM_STEPS - 1


def test_by_default_a_bad_loss_is_reported_once_and_training_continues(aimless, tmp_path):
    """The default: what a job does with its numbers is its own matter."""
    records = run(tmp_path / "a", job(), aimless)
    assert records[-1]["state"] == "succeeded"
    told, _ = by_hand(aimless, skips=False)
    assert same(losses(records), told)
    (found,) = findings(records)
    assert (found["step"], found["layer"], found["kind"]) == (BAD, "target", "input")
    assert "bad_samples" in found["causes"][0]


def test_a_job_that_is_to_fail_says_where_and_keeps_its_last_good_parameters(aimless, tmp_path):
    body = job({"action": "fail"}, checkpoint={"every_steps": 1})
    records = run(tmp_path / "a", body, aimless)
    assert records[-1]["state"] == "failed"
    error = records[-1]["error"]
    assert (error["code"], error["layer"], error["step"]) == ("non_finite", "target", BAD)
    assert error["nonfinite"]["samples"] == [*range(BATCH * BAD, BATCH * (BAD + 1))]
    assert error["hint"] == NonFinite.OF_DATA, "the rate is not at fault"
    assert losses(records)[BAD] == "NaN"
    assert findings(records)[0]["severity"] == "error"
    newest = max(int(path.name.split("-")[1]) for path in (tmp_path / "a/checkpoints").iterdir())
    assert newest == BAD


def test_too_many_skipped_in_a_row_end_the_job(tmp_path):
    spoilt = {(row, 0): np.nan for row in range(BATCH * BAD, BATCH * NUM_STEPS, 2)}
    table = table_of(tmp_path, target=spoilt)
    records = run(tmp_path / "a", job({"action": "skip_step", "max_skipped": 3}), table)
    error = records[-1]["error"]
    assert (error["code"], error["category"]) == ("too_many_skipped", "nonfinite")
    assert (error["layer"], error["step"]) == ("target", BAD + 3)
    assert "4 steps in a row were skipped, and 3 may be" in error["message"]
    assert [item["step"] for item in findings(records)] == [BAD, BAD + 3]


def test_what_is_skipped_over_is_not_blamed(tmp_path):
    """A layer that masks with infinities is no fault; the loss after it is."""
    spoilt = {(row, 0): -np.inf for row in range(BATCH * NUM_STEPS)}
    table = table_of(tmp_path, side=spoilt, target={(BATCH * BAD, 0): np.nan})
    guard = {"check": ["loss", "outputs"], "skip": ["look", "side"]}
    (found,) = findings(run(tmp_path / "a", job(guard, layers=[LOOK, *HIDDEN]), table))
    assert (found["step"], found["layer"]) == (BAD, "target")


def test_a_run_that_continues_from_a_checkpoint_counts_on(tmp_path):
    spoilt = {(BATCH * step, 0): np.nan for step in (10, 11, 12, 20)}
    table = table_of(tmp_path, target=spoilt)
    body = job({"action": "skip_step"}, checkpoint={"every_steps": 1, "keep_last": 100})
    whole = run(tmp_path / "a", body, table)
    for step in (11, 13):
        there = {"dir": str(tmp_path / f"a/checkpoints/step-{step}"), "step": step}
        rest = run(tmp_path / f"b{step}", body, table, resume=there)
        assert losses(rest) == losses(whole)[step:]
        for kind in ("finding", "metrics"):
            told = [
                {**item, "at": None}
                for item in of_type(whole, kind)
                if item["step"] >= step and ("skipped_steps" in item.get("values", "skipped_steps"))
            ]
            mine = [
                {**item, "at": None}
                for item in of_type(rest, kind)
                if "skipped_steps" in item.get("values", "skipped_steps")
            ]
            assert mine == told
        assert weights(tmp_path / f"b{step}") == weights(tmp_path / "a")


def test_steps_in_a_row_are_counted_over_a_resume(tmp_path):
    spoilt = {(row, 0): np.nan for row in range(BATCH * 10, BATCH * NUM_STEPS)}
    table = table_of(tmp_path, target=spoilt)
    guard = {"action": "skip_step", "max_skipped": 5}
    body = job(guard, checkpoint={"every_steps": 1, "keep_last": 100})
    whole = run(tmp_path / "a", body, table)
    there = {"dir": str(tmp_path / "a/checkpoints/step-13"), "step": 13}
    rest = run(tmp_path / "b", body, table, resume=there)
    assert whole[-1]["error"]["step"] == 15
    assert rest[-1]["error"] == whole[-1]["error"]


# --- where the numbers come home late ---------------------------------------------------------


def fused(network: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "Adam":
        return torch.optim.Adam(network.parameters(), lr=0.1, fused=True)
    momentum = 0.9 if name == "momentum" else 0.0
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=momentum, fused=True)


def late_loop(name: str, action: Any, bad: set[int], *, by_flag: bool) -> list[dict[str, Any]]:
    """A training whose host learns nothing of the numbers; the states after each step."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = fused(network, name)
    gate = (
        UpdateGate(network, optimizer, torch.device("cpu"), action, is_late=True)
        if by_flag
        else None
    )
    states: list[dict[str, Any]] = []
    for step in range(8):
        x = torch.randn(4, 3) * (math.nan if step in bad else 1.0)
        before = [item.clone() for item in network.buffers()]
        if gate is not None:
            gate.begin()
        loss = network(x).square().mean() + network[0].weight.sum()
        loss.backward()
        if gate is not None:
            gate.take([loss.detach()])
            optimizer.step()
            assert gate.has_skipped == (step in bad and action == "skip_step")
        elif step not in bad:
            optimizer.step()
        elif action == "skip_step":
            for item, was in zip(network.buffers(), before, strict=True):
                item.copy_(was)
        optimizer.zero_grad(set_to_none=True)
        kept = [
            v.clone() for entry in optimizer.state.values() for v in entry.values() if v is not None
        ]
        tensors = (
            network.state_dict() if action == "skip_step" else dict(network.named_parameters())
        )
        states.append({k: v.clone() for k, v in tensors.items()} | {"kept": kept})
    return states


@pytest.mark.parametrize("name", ["Adam", "momentum", "plain"])
@pytest.mark.parametrize("bad", [{0, 3, 4}, {5}, set[int]()])
def test_the_device_itself_withholds_an_update(name: str, bad: set[int]):
    mine = late_loop(name, "skip_step", bad, by_flag=True)
    theirs = late_loop(name, "skip_step", bad, by_flag=False)
    for step, (got, wanted) in enumerate(zip(mine, theirs, strict=True)):
        for key in wanted:
            if key != "kept":
                assert torch.equal(got[key], wanted[key]), (step, key)
        assert len(got["kept"]) == len(wanted["kept"])
        for one, other in zip(got["kept"], wanted["kept"], strict=True):
            assert torch.equal(one, other), step


@pytest.mark.parametrize("name", ["Adam", "momentum", "plain"])
def test_what_is_to_fail_waits_with_its_parameters_until_the_host_knows(name: str):
    states = late_loop(name, "fail", {3}, by_flag=True)
    for later in states[3:]:
        for key, item in states[2].items():
            if key != "kept":
                assert torch.equal(later[key], item)
    assert not torch.equal(states[1]["0.weight"], states[2]["0.weight"])


# --- what it costs ----------------------------------------------------------------------------


def test_gradients_are_inspected_less_often_where_that_is_expensive():
    now = [0.0]

    def steps(pace: CheckInterval, cost_s: float, number: int) -> list[int]:
        due: list[int] = []
        for step in range(number):
            now[0] += 1.0
            if pace.is_due():
                due.append(step)
                with pace:
                    now[0] += cost_s
        return due

    cheap = CheckInterval(leaves_out=True, clock=lambda: now[0])
    assert steps(cheap, 0.9 * SHARE, 100) == [*range(100)]
    dear = CheckInterval(leaves_out=True, clock=lambda: now[0])
    due = steps(dear, 10 * SHARE, 400)
    assert due[:4] == [*range(4)]
    assert due[4] > 5
    assert len(due) * 10 * SHARE / 400 < 2 * SHARE
    assert steps(CheckInterval(leaves_out=False, clock=lambda: now[0]), 1.0, 50) == [*range(50)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_is_finite_only_where_all_values_are(bad: float):
    tensors = [torch.ones(3), torch.zeros(0), torch.full((2, 2), 3.0)]
    like = torch.zeros(())
    assert norm_of(tensors, like).item() == pytest.approx(math.sqrt(39))
    assert norm_of(tensors, like, math.inf).item() == 3
    assert norm_of([None], like).item() == 0
    sparse = torch.sparse_coo_tensor(
        [[0, 0]], torch.tensor([3.0, 4.0]), (9,), check_invariants=True
    )
    assert norm_of([*tensors, sparse], like).item() == pytest.approx(8)
    for place in (tensors[0], tensors[2], sparse._values()):
        place.view(-1)[-1] = bad
        for order in (2, math.inf):
            assert not math.isfinite(norm_of([*tensors, sparse], like, order).item())
        place.view(-1)[-1] = 1.0


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ('{"action": "skip_step", "check": ["parameters"]}', "cannot undo"),
        ('{"action": "skip_step", "check": []}', "at least one check"),
        ('{"max_skipped": 3}', "max_skipped"),
        ('{"check": ["weights"]}', "parameters"),
        ('{"action": "ignore"}', "warn"),
        ('{"memory": 1}', "Extra"),
    ],
)
def test_what_it_cannot_do_is_refused(body: str, word: str):
    with pytest.raises(ValidationError, match=word):
        NonfiniteGuard.model_validate_json(body)


def test_a_glob_that_names_nothing_is_refused_at_its_place(table):
    meta = json.loads((table / "meta.json").read_text())
    found = errors(job({"skip": ["fc", "drop*", "nothing*"]}), meta)
    assert list(found) == ["/guards/nonfinite/skip/2"]
    assert "hidden" in found["/guards/nonfinite/skip/2"]


def test_on_cuda_an_optimizer_that_cannot_be_told_is_warned_of(table):
    meta = json.loads((table / "meta.json").read_text())
    body = job({"action": "skip_step"}) | {"devices": {"type": "cuda"}}
    told = {item["pointer"]: item["detail"] for item in planned(body, meta)["warnings"]}
    assert "fused" in told["/guards/nonfinite/action"]
    body["optimizer"] = {"type": "Adam", "args": {"fused": True}}
    told = {item["pointer"] for item in planned(body, meta)["warnings"]}
    assert "/guards/nonfinite/action" not in told
    for more in ({"average": {"type": "ema"}}, {"scheduler": {"type": "CosineAnnealingLR"}}):
        told = {item["pointer"]: item["detail"] for item in planned(body | more, meta)["warnings"]}
        assert "skipped steps" in told["/guards/nonfinite/action"]
