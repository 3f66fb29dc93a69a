"""The number of torch threads changes between two steps, and no later number depends on when."""

from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.process.rank import Assignment
from engine.process.rank import run as run_assignment
from engine.training.report import Outputs
from tests.unit.engine.runs import losses, of_type, planned, run, spec, write_job

# Wide enough that torch divides the work among threads
WIDE: list[dict[str, Any]] = [
    {"name": "flat", "type": "Flatten"},
    {"name": "wide", "type": "Linear", "args": {"out_features": 512}},
    {"name": "relu", "type": "ReLU"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
JOB: dict[str, Any] = {
    "network": {"layers": WIDE},
    "stop": {"steps": 12},
    "checkpoint": {"every_steps": 4, "keep_last": 9},
}
WATCHED = [{"layers": ["*"], "kinds": ["output", "param_grad"], "every": 1, "max_overhead": None}]


@pytest.fixture(autouse=True)
def threads_as_before() -> Generator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Changing:
    """A control that has another number of threads once so many steps have ended."""

    cancel_requested, ends_as, wanted, listen = False, "cancelled", None, None

    def __init__(self, *changes: tuple[int, int]) -> None:
        self.changes = changes
        self.orders: deque[dict[str, Any]] = deque()
        self.seen: list[dict[str, Any]] = []

    @property
    def threads(self) -> int | None:
        done = len(losses(self.seen))
        return next((count for after, count in reversed(self.changes) if done >= after), None)


def changed(directory: Path, digits: Path, *changes: tuple[int, int], **more: Any) -> Changing:
    """Run the job, which starts with two threads, with these changes: after a step, to a number."""
    device = {"type": "cpu", "threads": 2}
    resolved = planned(spec(**JOB, **more))["spec"]
    job = write_job(directory, resolved, digits, device=device)
    control = Changing(*changes)
    outputs = Outputs(directory, control.seen.append)
    end = run_assignment(Assignment.read(job / "job.json"), control=control, out=outputs)
    assert end.state == "succeeded"
    return control


def test_a_change_is_made_between_two_steps_and_reported_once(digits: Path, tmp_path: Path):
    control = changed(tmp_path / "a", digits, (4, 1), (8, 2))
    found = [
        {name: one[name] for name in ("what", "from", "to", "by", "step")}
        for one in of_type(control.seen, "adjusted")
    ]
    common = {"what": "threads", "by": "scheduler"}
    assert found == [
        {**common, "from": 2, "to": 1, "step": 4},
        {**common, "from": 1, "to": 2, "step": 8},
    ]
    assert torch.get_num_threads() == 2
    assert len(losses(control.seen)) == 12


def test_a_run_that_resumes_where_the_threads_changed_has_the_same_numbers(
    digits: Path, tmp_path: Path
):
    whole = changed(tmp_path / "a", digits, (4, 1))
    start = {"dir": str(tmp_path / "a" / "checkpoints" / "step-4"), "step": 4}
    resumed = run(tmp_path / "b", spec(**JOB), digits, resume=start)  # with one thread
    assert losses(resumed) == losses(whole.seen)[4:]
    alone = run(tmp_path / "c", spec(**JOB), digits, device={"type": "cpu", "threads": 2})
    assert losses(alone)[:4] == losses(whole.seen)[:4]


def test_watching_changes_no_number_while_the_threads_change(digits: Path, tmp_path: Path):
    plain = changed(tmp_path / "a", digits, (3, 1), (7, 2))
    watched = changed(tmp_path / "b", digits, (3, 1), (7, 2), probes=WATCHED)
    assert of_type(watched.seen, "stats")
    assert losses(watched.seen) == losses(plain.seen)
