"""A job that no device can hold is refused, and ``auto`` takes the first strategy that fits."""

import json
from typing import Any

import pytest

from api.submission.submission import _choose_strategy, _mark_fitting, _refuse_too_large
from glasshouse.errors import InvalidSpec
from glasshouse.spec import TrainJob, parse_job
from tests.unit.engine.runs import spec

GIB = 2**30
PLAN: dict[str, Any] = {
    "memory": {"total_bytes": 10 * GIB, "checkpoint_bytes": 4 * GIB},
    "parallel": None,
}


def device(kind: str, gib: int | None) -> dict[str, object]:
    return {"kind": kind, "memory_bytes": None if gib is None else gib * GIB}


def job(**parallel: Any) -> TrainJob:
    found = parse_job(json.dumps(spec(parallel={"processes": 1, **parallel})))
    assert isinstance(found, TrainJob)
    return found


def plan_of(processes: int = 2, **gib: int) -> dict[str, Any]:
    """A plan whose strategies need this much of each process, and 4 GiB for checkpoints."""
    strategies = [
        {"strategy": name, "memory": {"total_bytes": (4 + own) * GIB, "checkpoint_bytes": 4 * GIB}}
        for name, own in gib.items()
    ]
    parallel = {"processes": processes, "strategies": strategies}
    return {"memory": strategies[0]["memory"], "parallel": parallel}


def test_the_copy_for_a_checkpoint_counts_where_it_is():
    _refuse_too_large(job(), PLAN, [device("cpu", 10)])
    _refuse_too_large(job(), PLAN, [device("cuda", 6)])
    _refuse_too_large(job(), PLAN, [device("cpu", 1), device("cuda", 6)])
    with pytest.raises(InvalidSpec, match=r"about 10\.0 GiB, and .* has 9\.0 GiB"):
        _refuse_too_large(job(), PLAN, [device("cpu", 9)])
    with pytest.raises(InvalidSpec, match=r"about 6\.0 GiB, and .* has 5\.0 GiB"):
        _refuse_too_large(job(), PLAN, [device("cuda", 5)])


def test_processes_on_cores_share_the_memory_of_their_host():
    three = job(processes=3)
    _refuse_too_large(three, PLAN, [device("cuda", 6)])
    _refuse_too_large(three, PLAN, [device("cpu", 22)])  # 3 times 6, and 4 for checkpoints
    with pytest.raises(InvalidSpec, match=r"about 22\.0 GiB"):
        _refuse_too_large(three, PLAN, [device("cpu", 21)])


@pytest.mark.parametrize(
    ("devices", "fits", "chosen"),
    [
        ([device("cuda", 6)], [True, True], None),
        ([device("cuda", 5)], [False, True], "fsdp"),
        ([device("cuda", 2)], [False, False], None),
        ([device("cpu", 16)], [True, True], None),
        ([device("cpu", 15)], [False, True], "fsdp"),
        ([device("cuda", None)], [None, None], None),
        ([device("cuda", None), device("cuda", 5)], [False, True], "fsdp"),
        ([], [None, None], None),
    ],
)
def test_auto_takes_the_first_strategy_that_fits(devices, fits, chosen):
    plan = plan_of(data=6, fsdp=3)
    _mark_fitting(plan, devices)
    assert [one["fits"] for one in plan["parallel"]["strategies"]] == fits
    assert _choose_strategy(job(processes=2, strategy="auto"), plan) == chosen
    assert _choose_strategy(job(processes=2, strategy="data"), plan) is None


def test_a_job_that_is_too_large_is_pointed_to_the_strategy_that_fits():
    plan = plan_of(data=6, fsdp=3)
    _mark_fitting(plan, [device("cuda", 5)])
    with pytest.raises(InvalidSpec, match=r"set parallel.strategy to fsdp, or make"):
        _refuse_too_large(job(processes=2), plan, [device("cuda", 5)])
    _mark_fitting(plan, [device("cuda", 2)])
    with pytest.raises(InvalidSpec, match=r"2\.0 GiB; make the network"):
        _refuse_too_large(job(processes=2), plan, [device("cuda", 2)])


def test_processes_of_a_pipeline_need_what_they_need_together():
    plan = plan_of(pipeline=6)
    (own,) = plan["parallel"]["strategies"]
    own["host_bytes"] = 14 * GIB  # 6, 4, and 4 for checkpoints
    plan["parallel"] |= {"strategy": "pipeline", "host_bytes": own["host_bytes"]}
    two = job(processes=2, strategy="pipeline")
    for kind, gib, fits in [("cpu", 14, True), ("cpu", 13, False), ("cuda", 6, True)]:
        _mark_fitting(plan, [device(kind, gib)])
        assert own["fits"] is fits
    _refuse_too_large(two, plan, [device("cpu", 14)])
    with pytest.raises(InvalidSpec, match=r"about 14\.0 GiB"):
        _refuse_too_large(two, plan, [device("cpu", 13)])
    with pytest.raises(InvalidSpec, match=r"about 6\.0 GiB"):
        _refuse_too_large(two, plan, [device("cuda", 5)])
