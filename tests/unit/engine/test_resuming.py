"""Going on from a checkpoint: every later number is that of a run that never stopped."""

import json
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoint import checkpoint
from engine.core.spool import read_frames
from engine.data.batches.rows import MemoryRows
from engine.data.columns.loaded import LoadedField
from engine.process import rank
from engine.process.rank import Assignment
from engine.process.rank import run as run_assignment
from engine.training import loop
from engine.training.report import Outputs
from glasshouse.events import is_upkeep
from tests.unit.engine.runs import CNN, losses, of_type, planned, run, spec, write_job

EVERYTHING = [
    {
        "layers": ["*", "loss.rows"],
        "kinds": ["output", "output_grad", "param", "param_grad", "update", "optim_state"],
        "every": 1,
        "max_overhead": None,
    },
    {"layers": ["*"], "kinds": ["output"], "every": 2, "phase": "evaluate"},
    {"layers": ["fc"], "kinds": ["output"], "on": "nonfinite"},
]
PLAIN = [layer for layer in CNN if layer["type"] != "Dropout"]
NORMED = [*CNN[:1], {"name": "norm", "type": "BatchNorm2d"}, *CNN[1:]]
JUDGED = {
    "data": {"validation": {"dataset": "ds_1", "split": "test"}},
    "evaluate": {"every_steps": 2, "samples": 3},
    "metrics": [{"type": "accuracy", "inputs": ["fc", "label"]}],
}
WARM_UP = {
    "type": "SequentialLR",
    "args": {
        "schedulers": [
            {"type": "LinearLR", "args": {"total_iters": 4}},
            {"type": "MultiStepLR", "args": {"milestones": [1, 3]}},
        ],
        "milestones": [4],
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {
        "network": {"layers": PLAIN},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
    },
    "dropout and momentum": {},
    "no shuffle": {"data": {"shuffle": {"enabled": False}}},
    "short last batch dropped": {"data": {"drop_last": True}},
    "AdamW": {"optimizer": {"type": "AdamW", "args": {"lr": 0.01}}},
    "grad_clip": {"grad_clip": {"type": "global_norm", "max": 0.5}},
    "layer options": {
        "network": {
            "layers": [
                {**CNN[0], "lr_scale": 0.5, "grad_clip": {"type": "value", "max": 0.001}},
                *CNN[1:-1],
                {
                    **CNN[-1],
                    "weight_decay": {"bias": 0.0},
                    "l1": 0.001,
                    "output_grad_clip": 0.003,
                    "init": {"weight": {"type": "xavier_normal_"}},
                },
            ]
        },
        "optimizer": {"type": "AdamW", "args": {"lr": 0.01}, "l1": 0.0001},
        "scheduler": {"type": "OneCycleLR", "args": {"max_lr": 0.02}},
    },
    "bfloat16": {**JUDGED, "precision": "bfloat16"},
    "float16": {
        **JUDGED,
        "precision": "float16",
        "grad_scaler": {"init_scale": 2.0**20, "growth_interval": 2},
    },
    "two losses": {
        **JUDGED,
        "loss": [
            {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
            {"type": "MultiMarginLoss", "inputs": ["fc", "label"], "weight": 0.3},
        ],
    },
    "frozen layer": {
        "network": {"layers": [{**CNN[0], "trainable": False}, *CNN[1:]]},
        "optimizer": {"type": "Adam", "args": {"lr": 0.01}},
    },
    "batch norm": {"network": {"layers": NORMED}},
    "evaluations": JUDGED,
    "normalized": {
        **JUDGED,
        "data": {**JUDGED["data"], "normalize": {"image": {"type": "standard"}}},
    },
    "probes": {**JUDGED, "probes": EVERYTHING},
    "OneCycleLR": {"scheduler": {"type": "OneCycleLR", "args": {"max_lr": 0.2}}},
    "schedulers in sequence": {"scheduler": WARM_UP},
    "schedule of samples": {
        "scheduler": {"type": "CosineAnnealingLR", "unit": "samples", "args": {"T_max": 500}}
    },
    "plateau": {
        **JUDGED,
        "scheduler": {
            "type": "ReduceLROnPlateau",
            "metric": "validation/loss",
            "args": {"patience": 0, "threshold": 0.2},
        },
        "stop": {
            "epochs": 2,
            "early": {"metric": "validation/accuracy", "mode": "max", "patience": 9},
        },
    },
    "accumulate": {"data": {"batch_size": 16}, "accumulate": 4},
    "ema": {**JUDGED, "average": {"type": "ema", "decay": 0.8}},
    "swa": {"network": {"layers": NORMED}, "average": {"type": "swa", "start_step": 2}},
    "window": {"average": {"type": "window", "min_average_window": 2, "max_average_window": 3}},
    "metrics of torchmetrics": {
        **JUDGED,
        "metrics": [
            {
                "type": "MulticlassF1Score",
                "args": {"num_classes": 10},
                "inputs": ["fc", "label"],
                "every": 2,
            },
            {
                "type": "MulticlassConfusionMatrix",
                "args": {"num_classes": 10},
                "inputs": ["fc", "label"],
            },
        ],
    },
    "derived": {"metrics": [{"type": "l2", "inputs": ["fc.weight/update"], "every": 3}]},
}
PLACES = {"mid-epoch": 0.6, "epoch end": 1.0}
PARTS = ("model", "newest", "averages", "optimizer", "generators")
SEEN = ("metrics", "stats", "captures", "checkpoint", "artifact")
SIZES = ("files", "size_bytes")
"""Of a checkpoint; the seconds in it have more digits or fewer."""


def _saving(job: dict[str, Any]) -> dict[str, Any]:
    return job | {"checkpoint": {"every_steps": 1}}


def _resume(
    directory: Path, job: dict[str, Any], table: Path, step: int, source: Path
) -> list[dict[str, Any]]:
    """Run the rest of a job from a checkpoint of another run of it, in a directory of its own."""
    there = {"dir": str(source / "checkpoints" / f"step-{step}"), "step": step}
    return run(directory, job, table, resume=there)


def _seen(records: list[dict[str, Any]], first: int) -> dict[str, list[dict[str, Any]]]:
    """What a client sees of the steps from `first` on, by type, without what depends on timing.

    The position of records from threads depends on timing, too: a checkpoint comes after its steps
    and may be reported during later ones.
    """
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in SEEN}
    for record in records:
        kept = {key: value for key, value in record.items() if key not in ("at", *SIZES)}
        if record["type"] == "metrics":
            kept["values"] = {k: v for k, v in record["values"].items() if not is_upkeep(k)}
        if record["type"] not in SEEN or kept.get("values") == {}:
            continue
        if record["type"] == "artifact":
            step = int(record["name"].removesuffix(".safetensors").rpartition("-")[2])
        else:
            step = record["step"] - (record["type"] == "checkpoint")  # it follows the step before
        if step >= first:
            found[record["type"]].append(kept)
    return found


def _same_end(one: Path, other: Path, step: int) -> None:
    """Weights, optimizer state, generators and position, byte by byte."""
    mine, theirs = (item / "checkpoints" / f"step-{step}" for item in (one, other))
    for part in PARTS:
        name = f"{part}.safetensors"
        if (mine / name).exists() or (theirs / name).exists():
            assert (mine / name).read_bytes() == (theirs / name).read_bytes(), part
    states = [json.loads((item / "state.json").read_text()) for item in (mine, theirs)]
    for state in states:
        del state["parts"]["report"]["elapsed_s"]
        for row in state["parts"]["guard"]["kept"]:
            row[2] = None  # how often the norm is sampled depends on timing
        for watch in state["parts"]["probes"]["watches"].values():
            for record, *_ in watch.get("recorder", {}).get("kept", ()):
                del record["at"]
    for name, value in states[0]["metrics"].items():
        assert is_upkeep(name) or states[1]["metrics"][name] == value
    assert states[0]["parts"] == states[1]["parts"]


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    """Runs that were never interrupted, with a checkpoint after each step; made once each."""
    made: dict[str, tuple[Path, dict[str, Any], list[dict[str, Any]]]] = {}

    def get(kind: str):
        if kind not in made:
            directory = tmp_path_factory.mktemp("whole")
            job = _saving(spec(**KINDS[kind]))
            made[kind] = directory, job, run(directory, job, digits)
        return made[kind]

    return get


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_the_rest_of_a_run_is_bit_for_bit_what_it_would_have_been(
    digits, tmp_path, whole, kind, place
):
    directory, job, records = whole(kind)
    expected = losses(records)
    step = int(len(expected) // 2 * PLACES[place])
    resumed = _resume(tmp_path, job, digits, step, directory)
    assert losses(resumed) == expected[step:]
    assert _seen(resumed, step) == _seen(records, step)
    _same_end(directory, tmp_path, len(expected))
    last = [of_type(item, "progress")[-1] for item in (records, resumed)]
    assert last[0]["samples"] == last[1]["samples"]


@pytest.mark.parametrize("kind", ["dropout and momentum", "AdamW", "probes"])
def test_saving_after_each_step_changes_no_number(digits, tmp_path, whole, kind):
    job = spec(**KINDS[kind], checkpoint={"every_epochs": 99, "every_s": None})
    records = run(tmp_path, job, digits)
    assert losses(records) == losses(whole(kind)[2])
    _same_end(whole(kind)[0], tmp_path, len(losses(records)))


def test_a_run_that_is_resumed_at_every_step_is_still_the_same(digits, tmp_path, whole):
    directory, job, records = whole("dropout and momentum")
    source, found = directory, []
    for step in range(1, len(losses(records))):
        found.append(losses(_resume(tmp_path / str(step), job, digits, step, source))[0])
        source = tmp_path / str(step)
    assert found == losses(records)[1:]
    _same_end(directory, source, len(losses(records)))


@pytest.mark.parametrize("part", ["model", "optimizer", "generators", "position"])
def test_without_any_one_part_the_numbers_differ(digits, tmp_path, whole, monkeypatch, part):
    """The control: were one part not restored, the tests above would see it."""
    directory, job, records = whole("dropout and momentum")
    owners = {
        "model": loop.Weights,
        "optimizer": loop.OptimizerState,
        "generators": loop.Generators,
        "position": loop.Schedule,
    }

    def forget(self: Any, state: Any) -> None:
        if part == "position":  # the right step, but the first rows of the epoch again
            self.position = {"step": state["step"], "epoch": state["epoch"], "batch": 0}

    monkeypatch.setattr(owners[part], "restore", forget)
    resumed = _resume(tmp_path, job, digits, 3, directory)
    expected = losses(records)[3:]
    assert losses(resumed)[: len(expected)] != expected


class StopAfter:
    """A control that ends training when so many steps were reported."""

    wanted = None
    listen = None
    threads = None
    ends_as = "cancelled"
    orders = ()

    def __init__(self, num_steps: int, ends_as: str) -> None:
        self.ends_as = ends_as
        self.orders: deque[dict[str, Any]] = deque()
        self.seen: list[dict[str, Any]] = []
        self.num_steps = num_steps

    @property
    def cancel_requested(self) -> bool:
        return len(losses(self.seen)) >= self.num_steps


@pytest.mark.parametrize("ends_as", ["paused", "interrupted", "cancelled"])
def test_a_run_that_was_stopped_continues(digits, tmp_path, whole, ends_as):
    directory, _, records = whole("AdamW")
    job = spec(**KINDS["AdamW"])
    assignment = Assignment.read(
        write_job(tmp_path / "a", planned(job)["spec"], digits) / "job.json"
    )
    control = StopAfter(7, ends_as)
    outputs = Outputs(tmp_path / "a", control.seen.append)
    assert run_assignment(assignment, control=control, out=outputs).state == ends_as
    resumed = _resume(tmp_path / "b", job, digits, 7, tmp_path / "a")
    assert losses(control.seen) + losses(resumed) == losses(records)
    assert of_type(control.seen, "checkpoint")[-1]["final"] == (ends_as == "cancelled")
    _same_end(directory, tmp_path / "b", len(losses(records)))


def test_a_run_that_had_said_everything_says_nothing_twice(digits, tmp_path, whole):
    directory, job, records = whole("evaluations")
    resumed = _resume(tmp_path, job, digits, len(losses(records)), directory)
    assert [record["type"] for record in resumed] == ["end"]


def test_a_run_that_had_not_said_all_of_it_evaluates_and_saves(digits, tmp_path, whole):
    """It was killed, or paused, after the last step and before the end."""
    directory, job, records = whole("evaluations")
    step = len(losses(records))
    shutil.copytree(directory / "checkpoints" / f"step-{step}", tmp_path / "c")
    _alter(tmp_path / "c", {"final": False})
    resumed = run(tmp_path / "b", job, digits, resume={"dir": str(tmp_path / "c"), "step": step})
    assert not losses(resumed)
    values = [item["values"] for item in of_type(resumed, "metrics")]
    assert any("validation/loss" in item for item in values)
    assert of_type(resumed, "checkpoint")[-1]["final"]


def _alter(directory: Path, changes: dict[str, Any]) -> None:
    """Change what a checkpoint says, with a manifest that agrees."""
    state = checkpoint.read_state(directory) | changes
    said = checkpoint._write_json(directory / "state.json", state)
    manifest = json.loads((directory / "manifest.json").read_text()) | {"state.json": said}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_seconds_of_training_are_counted_on(digits, tmp_path):
    job = spec(stop={"seconds": 0.2}, checkpoint={"every_epochs": 1})
    run(tmp_path / "a", job, digits)
    saved = sorted(
        (tmp_path / "a" / "checkpoints").iterdir(), key=lambda path: path.stat().st_ctime
    )
    step = int(saved[-1].name.removeprefix("step-"))
    before = checkpoint.read_state(saved[-1])["parts"]["report"]["elapsed_s"]
    assert before >= 0.2
    resumed = _resume(tmp_path / "b", job, digits, step, tmp_path / "a")
    assert [record["type"] for record in resumed] == ["end"]


# --- what is refused ---------------------------------------------------------------------------


def _failure(directory: Path, job: dict[str, Any], table: Path, resume: dict[str, Any]) -> Any:
    meta = json.loads((table / "meta.json").read_text())
    write_job(directory, planned(job, meta)["spec"], table, resume=resume)
    assert rank.main(directory) == 0
    records, _ = read_frames(directory / "spool", 0, 10**6)
    assert records[-1]["state"] == "failed"
    assert not losses(records)
    return records[-1]["error"]


REFUSED = {
    "wider": (
        {"network": {"layers": [*CNN[:-1], {**CNN[-1], "args": {"out_features": 11}}]}},
        "fc",
    ),
    "other optimizer": ({"optimizer": {"type": "Adam"}}, "Adam"),
    "other seed": ({"seed": 4}, "seed"),
    "other batches": ({"data": {"batch_size": 32}}, "batch_size"),
    "fewer rows": (
        {"data": {"train": {"dataset": "ds_1", "split": "train", "fraction": [0, 0.5]}}},
        "num_rows",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_another_job_is_refused_by_name(digits, tmp_path, whole, capfd, case):
    directory, _, _ = whole("dropout and momentum")
    changes, word = REFUSED[case]
    there = {"dir": str(directory / "checkpoints" / "step-3"), "step": 3}
    error = _failure(tmp_path, spec(**changes), digits, there)
    assert (error["code"], error["retryable"]) == ("checkpoint_mismatch", False)
    assert word in error["message"]
    capfd.readouterr()


def test_a_damaged_checkpoint_fails_so_that_an_older_one_can_be_tried(
    digits, tmp_path, whole, capfd
):
    directory, job, _ = whole("dropout and momentum")
    shutil.copytree(directory / "checkpoints" / "step-3", tmp_path / "c")
    (tmp_path / "c" / "weights.pkl").write_bytes(b"")
    error = _failure(tmp_path / "a", job, digits, {"dir": str(tmp_path / "c"), "step": 3})
    assert (error["code"], error["retryable"]) == ("checkpoint_damaged", True)
    there = {"dir": str(directory / "checkpoints" / "step-3"), "step": 4}
    error = _failure(tmp_path / "b", job, digits, there)
    assert error["code"] == "checkpoint_damaged"
    assert "step 3, not of step 4" in error["message"]
    capfd.readouterr()


def test_other_threads_are_allowed_and_reported(digits, tmp_path, whole, capfd):
    directory, job, _ = whole("dropout and momentum")
    there = {"dir": str(directory / "checkpoints" / "step-3"), "step": 3}
    run(tmp_path, job, digits, resume=there, device={"type": "cpu", "threads": 2})
    assert "threads 2, and the checkpoint was made with 1" in capfd.readouterr().err


# --- the order of the rows -----------------------------------------------------------------------


def _rows(num: int) -> MemoryRows:
    field = LoadedField(torch.arange(num), is_integer=True)
    return MemoryRows({"id": field}, num, torch.device("cpu"))


def test_batches_draw_from_no_generator_but_their_own():
    before = torch.get_rng_state()
    numpy_before = np.random.get_state()[1].copy()
    for batch in _rows(40).epoch(7, drop_last=False, order=(3, 1)):
        assert len(batch["id"])
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


def test_batches_that_were_taken_are_skipped_and_the_others_are_the_same():
    rows = _rows(40)
    for order in ((3, 1), None):
        all_of_them = [batch["id"] for batch in rows.epoch(7, drop_last=False, order=order)]
        for first in range(len(all_of_them) + 1):
            rest = [b["id"] for b in rows.epoch(7, drop_last=False, order=order, first=first)]
            assert [item.tolist() for item in rest] == [i.tolist() for i in all_of_them[first:]]


def test_skipped_batches_are_not_made(monkeypatch):
    rows = _rows(70)
    made: list[Any] = []
    plain = rows.batch
    monkeypatch.setattr(rows, "batch", lambda *rows_B: made.append(rows_B) or plain(*rows_B))
    assert len(list(rows.epoch(7, drop_last=False, order=(1, 1), first=8))) == 2
    assert len(made) == 2
