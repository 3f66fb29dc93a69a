"""Commands to a job that trains: applied at one step boundary, and again after a restart."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.process.rank import Assignment
from engine.process.rank import run as run_assignment
from engine.training.report import Outputs
from tests.unit.engine.runs import by_hand, losses, of_type, planned, spec, write_job

LR = {"id": "cmd_1", "by": "ada", "set": {"optimizer.lr": 0.01}}


class Asking:
    """A control that asks for things at the boundaries of the steps that it names."""

    wanted = None
    listen = None
    threads = None

    def __init__(self, at: dict[int, list[dict[str, Any]]], ends: dict[int, str]) -> None:
        self.seen: list[dict[str, Any]] = []
        self._at, self._ends = dict(at), ends
        self._orders: deque[dict[str, Any]] = deque(self._at.pop(0, []))
        self.ends_as = "cancelled"

    @property
    def orders(self) -> deque[dict[str, Any]]:
        self._orders.extend(self._at.pop(len(losses(self.seen)), []))
        return self._orders

    @property
    def cancel_requested(self) -> bool:
        state = self._ends.get(len(losses(self.seen)))
        self.ends_as = state or self.ends_as
        return state is not None


def train(
    directory: Path,
    table: Path,
    at: dict[int, list[dict[str, Any]]] | None = None,
    *,
    ends: dict[int, str] | None = None,
    orders: list[dict[str, Any]] | None = None,
    meta: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[str, list[dict[str, Any]]]:
    """Run a job that is asked for things; how it ended, and its records."""
    resolved = planned(spec(**changes), meta)["spec"]
    path = write_job(directory, resolved, table, commands=orders or [])
    control = Asking(at or {}, ends or {})
    out = Outputs(directory, control.seen.append)
    end = run_assignment(Assignment.read(path / "job.json"), control=control, out=out)
    return end.state, control.seen


def weights(directory: Path, records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return load_file(directory / of_type(records, "checkpoint")[-1]["dir"] / "model.safetensors")


class Scheduled(torch.optim.SGD):
    """By hand: the learning rate is another one from some steps on, before their updates."""

    def __init__(self, parameters: Any, rates: dict[int, float]) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.rates, self.count = rates, 0

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["lr"] = self.rates.get(self.count, self.param_groups[0]["lr"])
        self.count += 1
        super().step(closure)


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_a_learning_rate_that_is_set_at_a_step_equals_torch_by_hand(digits, tmp_path):
    _, records = train(tmp_path, digits, {4: [LR]})
    expected, by_torch = by_hand(digits, lambda p: Scheduled(p, {4: 0.01}))
    assert losses(records) == expected
    assert equal(weights(tmp_path, records), by_torch)
    (told,) = of_type(records, "command")
    assert {
        name: told[name] for name in ("command", "state", "step", "set", "old", "new", "by")
    } == {
        "command": "cmd_1",
        "state": "applied",
        "step": 4,
        "set": {"optimizer.lr": 0.01},
        "old": {"optimizer.lr": 0.1},
        "new": {"optimizer.lr": 0.01},
        "by": "ada",
    }
    rates = [r["values"]["lr"] for r in of_type(records, "metrics") if "lr" in r["values"]]
    assert rates == [0.1] * 4 + [0.01] * 6


def test_what_was_asked_before_the_first_step_holds_for_it(digits, tmp_path):
    _, records = train(tmp_path, digits, orders=[LR])
    assert losses(records) == by_hand(digits, lambda p: Scheduled(p, {0: 0.01}))[0]
    assert of_type(records, "command")[0]["step"] == 0


def test_what_was_applied_before_a_restart_is_applied_again_at_its_own_step(digits, tmp_path):
    again = LR | {"step": 4, "old": {"optimizer.lr": 0.1}, "new": {"optimizer.lr": 0.01}}
    newer = {"id": "cmd_2", "by": "ada", "set": {"optimizer.lr": 0.2}}
    _, records = train(tmp_path, digits, {2: [newer]}, orders=[again])
    told = [(one["command"], one["step"], one["old"]) for one in of_type(records, "command")]
    assert told == [
        ("cmd_1", 4, {"optimizer.lr": 0.1}),
        ("cmd_2", 4, {"optimizer.lr": 0.01}),  # asked for later, so it is in force later
    ]
    assert losses(records) == by_hand(digits, lambda p: Scheduled(p, {4: 0.2}))[0]


def test_a_new_value_that_does_not_hold_any_more_is_rejected_and_nothing_of_it_applied(
    digits, tmp_path
):
    late = {"id": "cmd_1", "by": "ada", "set": {"stop.steps": 3, "optimizer.lr": 5.0}}
    _, records = train(tmp_path, digits, {6: [late]}, stop={"steps": 10})
    (told,) = of_type(records, "command")
    assert (told["state"], told["step"], told["old"]) == ("rejected", 6, None)
    assert told["problem"]["pointer"] == "/set/stop.steps"
    assert "6 steps already" in told["problem"]["detail"]
    assert losses(records) == by_hand(digits, lambda p: Scheduled(p, {}))[0]


def test_training_can_be_made_longer_and_shorter(digits, tmp_path):
    longer = {"id": "cmd_1", "set": {"stop.steps": 8}}
    shorter = {"id": "cmd_2", "set": {"stop.steps": 7}}
    _, records = train(tmp_path, digits, {4: [longer], 7: [shorter]}, stop={"steps": 4})
    assert len(losses(records)) == 7
    assert [one["state"] for one in of_type(records, "command")] == ["applied", "applied"]
    assert of_type(records, "progress")[-1]["num_steps"] == 7


def test_a_clip_threshold_holds_from_its_step_on(digits, tmp_path):
    clip = {"type": "global_norm", "max": 1e-3}
    tight = {"id": "cmd_1", "set": {"grad_clip.max": 1e-3}}
    wide = {"type": "global_norm", "max": 1e9}
    _, changed = train(tmp_path / "a", digits, {3: [tight]}, grad_clip=wide)
    _, loose = train(tmp_path / "b", digits, grad_clip=wide)
    _, always = train(tmp_path / "c", digits, grad_clip=clip)
    assert losses(changed)[:4] == losses(loose)[:4]
    assert losses(changed)[4:] != losses(loose)[4:]
    assert losses(always)[1] != losses(loose)[1]
    (told,) = of_type(changed, "command")
    assert (told["old"], told["new"]) == ({"grad_clip.max": 1e9}, {"grad_clip.max": 1e-3})


def test_commands_run_after_the_current_step(digits, tmp_path):
    data = {"validation": {"dataset": "ds_1", "split": "test"}}
    orders = [{"id": "cmd_1", "do": "evaluate"}, {"id": "cmd_2", "do": "checkpoint"}]
    when = {"evaluate": {"every_steps": 1000}, "checkpoint": {"every_steps": 1000}}
    _, records = train(tmp_path, digits, {3: orders}, data=data, **when)
    judged = [r["step"] for r in of_type(records, "metrics") if "validation/loss" in r["values"]]
    assert judged == [2, 9]
    assert [one["step"] for one in of_type(records, "checkpoint")] == [3, 10]
    assert [(one["do"], one["step"]) for one in of_type(records, "command")] == [
        ("evaluate", 3),
        ("checkpoint", 3),
    ]
    assert losses(records) == by_hand(digits, lambda p: Scheduled(p, {}))[0]


@pytest.mark.parametrize("state", ["paused", "interrupted"])
def test_a_job_that_is_to_continue_later_ends_with_a_checkpoint_that_is_not_the_last(
    digits, tmp_path, state: str
):
    data = {"validation": {"dataset": "ds_1", "split": "test"}}
    found, records = train(
        tmp_path, digits, ends={4: state}, data=data, evaluate={"every_steps": 4}
    )
    assert found == state
    assert len(losses(records)) == 4
    saved = of_type(records, "checkpoint")[-1]
    assert (saved["step"], saved["final"]) == (4, False)
    judged = [r["step"] for r in of_type(records, "metrics") if "validation/loss" in r["values"]]
    assert judged == [3]  # what was due after the step comes, and nothing of the end


def test_a_job_that_comes_to_its_end_while_it_is_paused_has_succeeded(digits, tmp_path):
    found, records = train(tmp_path, digits, ends={10: "paused"})
    assert found == "succeeded"
    assert of_type(records, "checkpoint")[-1]["final"]


@pytest.mark.parametrize("load", ["all", "model"])
def test_a_fork_is_what_a_continuation_by_hand_is(digits, tmp_path, load: str):
    _, records = train(tmp_path / "a", digits, ends={4: "paused"})
    saved = tmp_path / "a" / of_type(records, "checkpoint")[-1]["dir"]
    begins = {"init": {"checkpoint": "ckpt_x", "load": load}}
    slower = {"optimizer": {"type": "SGD", "args": {"lr": 0.01, "momentum": 0.9}}}
    resolved = planned(spec(**begins, **slower))["spec"]
    path = write_job(tmp_path / "b", resolved, digits, checkpoint={"dir": str(saved)})
    control = Asking({}, {})
    out = Outputs(tmp_path / "b", control.seen.append)
    assignment = Assignment.read(path / "job.json")
    assert run_assignment(assignment, control=control, out=out).state == "succeeded"
    steps = [r["step"] for r in of_type(control.seen, "metrics") if "loss" in r["values"]]
    expected, by_torch = by_hand(digits, lambda p: Scheduled(p, {4: 0.01}))
    if load == "all":
        assert steps == list(range(4, 10))
        assert losses(control.seen) == expected[4:]
        assert equal(weights(tmp_path / "b", control.seen), by_torch)
    else:
        assert steps == list(range(10))
        assert losses(control.seen)[0] not in expected
