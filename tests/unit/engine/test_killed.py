"""Ranks that are killed at any moment: what they saved is whole, and nothing is trained twice.

``GLASSHOUSE_KILLS=200`` kills as often as a release must survive.
"""

import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint import checkpoint, saving
from engine.core import safetensors_writer
from engine.core.spool import read_frames
from engine.data.batches.rows import shuffled
from engine.process import rank
from glasshouse.failpoints import chosen
from tests.unit.engine.processes import forking
from tests.unit.engine.runs import losses, of_type, planned, run, spec, write_job, write_table
from tests.unit.engine.test_fork_server import Client
from tests.waiting import until

KILLS = int(os.environ.get("GLASSHOUSE_KILLS", "12"))


@pytest.fixture(scope="module")
def fork_server():
    client = Client()
    yield client
    assert client.close() == 0


@dataclass
class Chain:
    """Attempts of one job. Each resumes from the newest reported checkpoint."""

    fork_server: Client
    directory: Path
    resolved: dict[str, Any]
    table: Path
    num_attempts: int = 0
    num_checkpoints: int = 0
    resume: dict[str, Any] | None = None
    seen: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """The metrics of each step, as a client sees them: of the newest attempt that made it."""

    def start(self) -> tuple[Path, int]:
        self.num_attempts += 1
        job = self.directory / str(self.num_attempts)
        write_job(job, self.resolved, self.table, resume=self.resume)
        return job, self.fork_server.fork(job)["pid"]

    def take(self, job: Path) -> list[dict[str, Any]]:
        """What an attempt left: every checkpoint that has its name must be whole."""
        records, _ = read_frames(job / "spool", 0, 10**6)
        first = 0 if self.resume is None else self.resume["step"]
        self.seen = {step: values for step, values in self.seen.items() if step < first}
        for record in of_type(records, "metrics"):
            if "loss" in record["values"]:
                assert record["step"] not in self.seen
                self.seen[record["step"]] = record["values"]
        there = {path.name for path in (job / "checkpoints").glob("step-*")}
        told = of_type(records, "checkpoint")
        assert {Path(record["dir"]).name for record in told} <= there
        for name in there:
            saved = checkpoint.read(job / "checkpoints" / name)
            assert {*range(saved.step)} <= self.seen.keys(), "saved before its steps were reported"
        self.num_checkpoints += len(told)
        if told:
            self.resume = {"dir": str(job / told[-1]["dir"]), "step": told[-1]["step"]}
        return records

    def kill_after(self, num_metrics: int, pause_s: float) -> bool:
        """One attempt, killed when it has told so many steps, and a moment later."""
        job, pid = self.start()
        until(lambda: _num_told(job) >= num_metrics or _has_ended(job))
        time.sleep(pause_s)  # not for luck: any moment is a good one
        os.kill(pid, signal.SIGKILL)
        exit_ = self.fork_server.read()
        self.take(job)
        return exit_["signal"] == signal.SIGKILL

    def finish(self) -> None:
        job, _ = self.start()
        assert self.fork_server.read()["code"] == 0
        assert self.take(job)[-1]["state"] == "succeeded"


def _num_told(job: Path) -> int:
    return len(of_type(read_frames(job / "spool", 0, 10**6)[0], "metrics"))


def _has_ended(job: Path) -> bool:
    return bool(of_type(read_frames(job / "spool", 0, 10**6)[0], "end"))


@pytest.mark.long
def test_a_rank_killed_at_any_moment_leaves_whole_checkpoints_and_the_same_numbers(
    fork_server, digits, tmp_path
):
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "wide", "type": "Linear", "args": {"out_features": 1000}},
        {"name": "drop", "type": "Dropout"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    job = spec(
        network={"layers": layers},
        optimizer={"type": "AdamW", "args": {"lr": 0.001}},
        stop={"steps": 10 * KILLS},
        checkpoint={"every_steps": 1},
    )
    chain = Chain(fork_server, tmp_path, planned(job)["spec"], digits)
    random_ = random.Random(5)  # noqa: S311 - no secret
    killed = sum(
        chain.kill_after(random_.randrange(6), random_.uniform(0, 0.03)) for _ in range(KILLS)
    )
    chain.finish()
    assert killed >= KILLS // 2
    assert chain.num_checkpoints >= KILLS
    plain = run(tmp_path / "plain", job | {"checkpoint": {"every_steps": 10**6}}, digits)
    expected = {
        record["step"]: record["values"]["loss"]
        for record in of_type(plain, "metrics")
        if "loss" in record["values"]
    }
    assert {step: values["loss"] for step, values in chain.seen.items()} == expected


@pytest.mark.long
def test_each_row_is_used_once_in_an_epoch_however_often_the_rank_is_killed(fork_server, tmp_path):
    num = 1500
    columns = {"id": np.arange(num, dtype=np.float32), "y": np.arange(num) % 3}
    table = write_table(tmp_path / "data", columns, {"all": slice(None)})
    job = spec(
        network={
            "layers": [
                {"name": "column", "type": "reshape", "args": {"shape": [-1, 1]}},
                {"name": "fc", "type": "Linear", "args": {"out_features": 3}},
            ]
        },
        loss={"type": "CrossEntropyLoss", "inputs": ["fc", "y"]},
        optimizer={"type": "SGD", "args": {"lr": 1e-9}},
        data={
            "train": {"dataset": "ds_1"},
            "fields": {"id": {"type": "dense"}, "y": {"type": "integer", "dim": 3}},
            "batch_size": 1,
        },
        metrics=[{"type": "mean", "inputs": ["id"], "name": "row"}],
        checkpoint={"every_steps": 60},
        stop={"epochs": 2},
    )
    meta = json.loads((table / "meta.json").read_text())
    chain = Chain(fork_server, tmp_path / "job", planned(job, meta)["spec"], table)
    random_ = random.Random(9)  # noqa: S311 - no secret
    killed = sum(chain.kill_after(random_.randrange(100, 400), 0) for _ in range(5))
    chain.finish()
    assert killed == 5
    rows = [round(chain.seen[step]["row"]) for step in range(2 * num)]
    assert sorted(rows[:num]) == [*range(num)]
    assert sorted(rows[num:]) == [*range(num)]
    assert rows[:num] != rows[num:]
    assert rows[:num] == shuffled(num, 3, 0).tolist()


def _train_with(rule: str, directory: Path) -> None:
    """Train with a rule of ``FAILPOINTS``, which a process reads when it imports these modules."""
    follow = chosen({"FAILPOINTS": rule})
    for module in (checkpoint, safetensors_writer, saving):
        module.failpoint = follow
    rank.main(directory)


POINTS = {"write": 2, "sync": 7, "written": 2, "rename": 2, "renamed": 2, "durable": 2}
"""What is come by once in a save, but ``sync`` with each of its five files."""


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.long
def test_a_rank_killed_at_a_point_of_the_second_save_loses_that_one_at_most(
    digits, tmp_path, point
):
    job = spec(checkpoint={"every_steps": 3})
    expected = losses(run(tmp_path / "plain", job, digits))
    directory = write_job(tmp_path / "killed", planned(job)["spec"], digits)
    rule = f"checkpoint.{point}=kill@{POINTS[point]}"
    process = forking().Process(target=_train_with, args=(rule, directory))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert read_frames(directory / "spool", 0)[0][-1]["type"] != "end"
    checkpoint.clear_leftovers(directory / "checkpoints")
    there = {path.name for path in (directory / "checkpoints").iterdir()}
    assert there == {"step-3"} | ({"step-6"} if point in ("renamed", "durable") else set())
    for name in there:
        saved = checkpoint.read(directory / "checkpoints" / name)
        resume = {"dir": str(directory / "checkpoints" / name), "step": saved.step}
        assert losses(run(tmp_path / name, job, digits, resume=resume)) == expected[saved.step :]
