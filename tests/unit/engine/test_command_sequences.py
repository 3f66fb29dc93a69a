"""Whatever is set of a job while it trains, in whatever order: the job trains on."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import engine.training.commands as module
from engine.optim.lr_schedulers import LearningRate, scheduler_classes
from engine.optim.optimizers import build_optimizer, optimizer_classes
from engine.plan.plan import parse_spec
from engine.process.rank import Assignment
from engine.process.rank import run as run_assignment
from engine.training.report import Outputs
from engine.training.settable import settable
from glasshouse.spec import Scheduler, TrainJob
from tests.unit.engine.ragged import meta_of, write_ragged
from tests.unit.engine.runs import losses, of_type, planned, spec, write_job
from tests.unit.engine.test_commands import Asking, train, weights
from tests.unit.engine.test_schedulers import ARGS, PLATEAU, WITHIN, rates
from tests.unit.engine.test_sparse_beside_dense import ROWS, SPARSE
from tests.unit.engine.test_sparse_beside_dense import spec as pair

CYCLED = {"OneCycleLR", "CyclicLR"}
SCHEDULERS: dict[str, dict[str, Any]] = {
    **{name: {"type": name, "args": args} for name, args in (ARGS | WITHIN).items()},
    "InverseTimeLR": {"type": "InverseTimeLR", "args": {"gamma": 0.1}},
    "ReduceLROnPlateau": PLATEAU,
}
LINEAR = [
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10, "bias": False}},
]
JUDGED: dict[str, Any] = {
    "data": {"validation": {"dataset": "ds_1", "split": "test"}, "batch_size": 100},
    "evaluate": {"every_steps": 1},
    "network": {"layers": LINEAR},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {"momentum": 0.9},
}
EXTREME = [0, 1, -1, 5e-324, 1e-300, 1e-45, 0.5, 0.999999, 1e10, 1e30, 1e38, 3e38, 1e39, 1e300]
NUMBERS = st.sampled_from(EXTREME) | st.floats(0, 1) | st.floats(allow_nan=False, width=32)
EXAMPLES = int(os.environ.get("EXAMPLES", "4"))
WRONG: list[Any] = [None, "fast", "Infinity", True, [], [1.0]]


def job(optimizer: str, scheduler: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Numbers may become what they like: nothing guards them."""
    return spec(
        **JUDGED,
        optimizer={"type": optimizer, "args": ARGUMENTS.get(optimizer, {})},
        scheduler=scheduler,
        stop={"steps": 12, "early": {"metric": "validation/loss", "mode": "min", "patience": 50}},
        grad_clip={"type": "value", "max": 1.0, "min": -2.0},
        guards={"nonfinite": {"check": []}},
        **more,
    )


def values(path: str, like: Any) -> st.SearchStrategy[Any]:
    if isinstance(like, (list, tuple)):
        several = st.lists(NUMBERS, min_size=len(like), max_size=len(like))  # pyright: ignore
        return several | st.sampled_from(WRONG)
    if path.startswith(("stop.", "evaluate.", "checkpoint.", "grad_clip")):
        return st.integers(1, 40) | NUMBERS | st.sampled_from([10**9, 10**18])
    return NUMBERS | st.sampled_from(WRONG)


def sequences(parsed: TrainJob) -> st.SearchStrategy[dict[int, list[dict[str, Any]]]]:
    groups = {
        is_sparse: build_optimizer(half, [nn.Parameter(torch.ones(2, 2))]).param_groups[0]
        for is_sparse, half in [(False, parsed.optimizer), (True, parsed.optimizer.of_sparse)]
    }
    known = {
        path: groups[".sparse." in path].get(path.rpartition(".")[2]) for path in settable(parsed)
    }
    change = st.one_of(
        *(st.tuples(st.just(path), values(path, like)) for path, like in known.items())
    )
    changes = st.lists(change, min_size=1, max_size=2).map(dict)
    steps = st.lists(st.tuples(st.integers(0, 8), changes), min_size=1, max_size=6)
    return steps.map(
        lambda found: {
            step: [
                {"id": f"cmd_{n}", "set": one} for n, (at, one) in enumerate(found) if at == step
            ]
            for step in sorted({step for step, _ in found})
        }
    )


def check(
    directory: Path,
    table: Path,
    whole: dict[str, Any],
    asked: dict[int, Any],
    meta: dict[str, Any] | None = None,
) -> None:
    state, records = train(directory, table, asked, ends={12: "cancelled"}, meta=meta, **whole)
    assert state in ("succeeded", "cancelled"), records[-1]
    told = of_type(records, "command")
    assert len(losses(records)) >= 8 or told, "it ended for no reason"
    known: dict[str, Any] = {}
    for one in told:
        assert one["state"] in ("applied", "rejected")
        if one["state"] == "rejected":
            assert one["problem"]["pointer"].startswith("/set")
            assert one["problem"]["code"] != "not_applied", one
            continue
        for path, value in one["set"].items():
            is_reduced = path == "optimizer.lr" and whole.get("scheduler") == PLATEAU
            if path in known and not is_reduced:  # what was rejected in between left it alone
                assert one["old"][path] == known[path]
            known[path] = one["new"][path]
            if not isinstance(value, (str, list)):
                assert known[path] == value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [None, *SCHEDULERS])
@pytest.mark.long
def test_no_sequence_of_settings_ends_a_job_with_a_scheduler(name: str | None, digits):
    whole = job("SGD", None if name is None else SCHEDULERS[name])
    parsed = parse_spec(planned(whole)["spec"])
    assert isinstance(parsed, TrainJob)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(sequences(parsed))
    def holds(asked: dict[int, Any]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            check(Path(directory), digits, whole, asked)

    holds()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(optimizer_classes().keys() - {"SGD", "SparseAdam"}))
@pytest.mark.long
def test_no_sequence_of_settings_ends_a_job_with_an_optimizer(name: str, digits):
    whole = job(name, SCHEDULERS["StepLR"])
    parsed = parse_spec(planned(whole)["spec"])
    assert isinstance(parsed, TrainJob)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(sequences(parsed))
    def holds(asked: dict[int, Any]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            check(Path(directory), digits, whole, asked)

    holds()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sparse", SPARSE)
def test_no_sequence_of_settings_ends_a_job_with_two_optimizers(sparse: str, tmp_path):
    scheduler = SCHEDULERS["CosineAnnealingLR"]
    unguarded = {"nonfinite": {"check": []}}
    whole = pair(sparse, scheduler=scheduler, stop={"steps": 12}, guards=unguarded)
    table = write_ragged(tmp_path, ROWS)
    meta = meta_of(table)
    parsed = parse_spec(planned(whole, meta)["spec"])
    assert isinstance(parsed, TrainJob)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(sequences(parsed))
    def holds(asked: dict[int, Any]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            check(Path(directory), table, whole, asked, meta)

    holds()


def test_every_scheduler_of_the_catalog_is_tried_here():
    assert set(SCHEDULERS) == set(scheduler_classes())


# --- a rate of 0, and back --------------------------------------------------------------------


def setting(lr: float) -> list[dict[str, Any]]:
    return [{"id": f"cmd_{lr}", "set": {"optimizer.lr": lr}}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(SCHEDULERS.keys() - CYCLED))
def test_a_rate_set_to_0_and_back_is_where_the_schedule_would_be(name: str, digits, tmp_path):
    whole = spec(**JUDGED, scheduler=SCHEDULERS[name], stop={"steps": 12})
    plain = rates(train(tmp_path / "a", digits, **whole)[1])
    state, records = train(tmp_path / "b", digits, {3: setting(0.0), 6: setting(0.05)}, **whole)
    assert state == "succeeded"
    assert [one["state"] for one in of_type(records, "command")] == ["applied", "applied"]
    found = rates(records)
    assert found[:3] == plain[:3]
    assert found[3:6] == [0.0] * 3
    if (
        name == "ReduceLROnPlateau"
    ):  # its lr is the one in force; the evaluation that follows halves it
        assert found[6] == 0.025
    else:
        assert found[6:] == pytest.approx([0.5 * rate for rate in plain[6:]], rel=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(SCHEDULERS.keys() - CYCLED - {"ReduceLROnPlateau"}))
@pytest.mark.parametrize("first", [0.0, 1e-320])
@pytest.mark.long
def test_a_schedule_that_began_with_0_can_be_given_a_rate(name, first, digits, tmp_path):
    def whole(lr: float) -> dict[str, Any]:
        optimizer = {"type": "SGD", "args": {"lr": lr, "momentum": 0.9}}
        return spec(**JUDGED, scheduler=SCHEDULERS[name], stop={"steps": 12}, optimizer=optimizer)

    plain = rates(train(tmp_path / "a", digits, **whole(0.1))[1])
    state, records = train(tmp_path / "b", digits, {3: setting(0.1)}, **whole(first))
    assert state == "succeeded"
    (told,) = of_type(records, "command")
    assert (told["old"], told["new"]) == ({"optimizer.lr": first}, {"optimizer.lr": 0.1})
    assert rates(records)[3:] == plain[3:]


@pytest.mark.parametrize("paused_at", [4, 8])
def test_a_job_resumed_after_its_rate_was_set_is_the_one_that_was_not_interrupted(
    paused_at: int, digits, tmp_path
):
    asked = {3: setting(0.0), 6: setting(0.05)}
    whole = spec(**JUDGED, scheduler=SCHEDULERS["CosineAnnealingLR"], stop={"steps": 12})
    _, through = train(tmp_path / "a", digits, dict(asked), **whole)
    _, first = train(tmp_path / "b", digits, dict(asked), ends={paused_at: "paused"}, **whole)
    saved = of_type(first, "checkpoint")[-1]
    there = {"dir": str(tmp_path / "b" / saved["dir"]), "step": paused_at}
    left = [] if paused_at > 6 else [setting(0.05)[0] | {"step": 6, "old": {}, "new": {}}]
    _, second = resumed(tmp_path / "c", digits, whole, there, left)
    assert rates(first) + rates(second) == rates(through)
    assert losses(first) + losses(second) == losses(through)
    a, c = weights(tmp_path / "a", through), weights(tmp_path / "c", second)
    assert all(torch.equal(a[key], c[key]) for key in a)


def resumed(
    directory: Path, table: Path, whole: dict[str, Any], there: dict[str, Any], orders: list[Any]
) -> tuple[str, list[dict[str, Any]]]:
    path = write_job(directory, planned(whole)["spec"], table, resume=there, commands=orders)
    control = Asking({}, {})
    end = run_assignment(
        Assignment.read(path / "job.json"),
        control=control,
        out=Outputs(directory, control.seen.append),
    )
    return end.state, control.seen


# --- what nobody thought of --------------------------------------------------------------------


@pytest.mark.parametrize("place", ["set_arguments", "optimizer_values", "changed_job"])
def test_an_unexpected_error_rejects_the_command_and_changes_nothing(
    place: str, digits, tmp_path, monkeypatch
):
    whole = spec(
        **JUDGED,
        scheduler=SCHEDULERS["StepLR"],
        stop={"steps": 8},
        grad_clip={"type": "value", "max": 1.0},
    )
    _, plain = train(tmp_path / "a", digits, **whole)
    real: Callable[..., Any] = getattr(module, place)

    def broken(*args: Any, **more: Any) -> Any:
        real(*args, **more)  # done, and then it fails
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(module, place, broken)
    asked = {"optimizer.lr": 0.5, "optimizer.momentum": 0.1, "grad_clip.max": 1e-3}
    state, records = train(tmp_path / "b", digits, {3: [{"id": "cmd_1", "set": asked}]}, **whole)
    assert state == "succeeded"
    (told,) = of_type(records, "command")
    assert (told["state"], told["old"], told["new"]) == ("rejected", None, None)
    assert told["problem"]["pointer"] == "/set"
    assert told["problem"]["code"] == "not_applied"
    assert "nobody thought of this" in told["problem"]["detail"]
    assert losses(records) == losses(plain)
    assert rates(records) == rates(plain)


def test_what_the_loop_refuses_is_taken_back_from_optimizer_and_schedule(digits, tmp_path):
    """``stop`` is judged last: the rate was scaled by then."""
    whole = spec(**JUDGED, scheduler=SCHEDULERS["StepLR"], stop={"steps": 8})
    _, plain = train(tmp_path / "a", digits, **whole)
    late = {"id": "cmd_1", "set": {"stop.steps": 2, "optimizer.lr": 0.5}}
    _, records = train(tmp_path / "b", digits, {3: [late]}, **whole)
    (told,) = of_type(records, "command")
    assert told["problem"]["pointer"] == "/set/stop.steps"
    assert rates(records) == rates(plain)
    assert losses(records) == losses(plain)


def test_a_schedule_that_was_scaled_equals_torch_scaled_by_hand():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    rate = LearningRate(Scheduler(type="CosineAnnealingLR", args=COSINE), optimizer)
    by_torch = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = lr_scheduler.CosineAnnealingLR(by_torch, **COSINE)
    for step in range(20):
        if step == 5:
            rate.rebase(0.02, optimizer)
        factor = 1.0 if step < 5 else 0.2
        expected = factor * by_torch.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12), step
        rate.count(1, ends_epoch=False)
        by_torch.step()
        schedule.step()


COSINE = {"T_max": 10, "eta_min": 0.01}
