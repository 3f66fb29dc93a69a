"""A job that no device can hold is refused, and ``auto`` takes the first strategy that fits."""

import json
from typing import Any

import pytest

from api.submission.fitting import choose_strategy, mark_fitting, refuse_too_large
from glasshouse.errors import InvalidSpec
from glasshouse.spec import TrainJob, parse_job
from tests.unit.engine.runs import spec

GIB = 2**30
PLAN: dict[str, Any] = {
    "memory": {"total_bytes": 10 * GIB, "checkpoint_bytes": 4 * GIB},
    "parallel": None,
}


def device(kind: str, gib: int | None, host: int | None = None) -> dict[str, object]:
    sizes = {"memory_bytes": gib, "host_memory_bytes": gib if kind == "cpu" else host}
    known = {name: None if size is None else size * GIB for name, size in sizes.items()}
    return {"kind": kind, **known}


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
    refuse_too_large(job(), PLAN, [device("cpu", 10)])
    refuse_too_large(job(), PLAN, [device("cuda", 6)])
    refuse_too_large(job(), PLAN, [device("cpu", 1), device("cuda", 6)])
    with pytest.raises(InvalidSpec, match=r"about 10\.0 GiB, and .* has 9\.0 GiB"):
        refuse_too_large(job(), PLAN, [device("cpu", 9)])
    with pytest.raises(InvalidSpec, match=r"about 6\.0 GiB, and .* has 5\.0 GiB"):
        refuse_too_large(job(), PLAN, [device("cuda", 5)])


def test_processes_on_cores_share_the_memory_of_their_host():
    three = job(processes=3)
    refuse_too_large(three, PLAN, [device("cuda", 6)])
    refuse_too_large(three, PLAN, [device("cpu", 22)])  # 3 times 6, and 4 for checkpoints
    with pytest.raises(InvalidSpec, match=r"about 22\.0 GiB"):
        refuse_too_large(three, PLAN, [device("cpu", 21)])


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
    mark_fitting(plan, devices)
    assert [one["fits"] for one in plan["parallel"]["strategies"]] == fits
    assert choose_strategy(job(processes=2, strategy="auto"), plan) == chosen
    assert choose_strategy(job(processes=2, strategy="data"), plan) is None


def test_a_job_that_is_too_large_is_pointed_to_the_strategy_that_fits():
    plan = plan_of(data=6, fsdp=3)
    mark_fitting(plan, [device("cuda", 5)])
    with pytest.raises(InvalidSpec, match=r"set parallel.strategy to fsdp, or make"):
        refuse_too_large(job(processes=2), plan, [device("cuda", 5)])
    mark_fitting(plan, [device("cuda", 2)])
    with pytest.raises(InvalidSpec, match=r"2\.0 GiB; make the network"):
        refuse_too_large(job(processes=2), plan, [device("cuda", 2)])


def test_processes_of_a_pipeline_need_what_they_need_together():
    plan = plan_of(pipeline=6)
    (own,) = plan["parallel"]["strategies"]
    own["host_bytes"] = 14 * GIB  # 6, 4, and 4 for checkpoints
    plan["parallel"] |= {"strategy": "pipeline", "host_bytes": own["host_bytes"]}
    two = job(processes=2, strategy="pipeline")
    for kind, gib, fits in [("cpu", 14, True), ("cpu", 13, False), ("cuda", 6, True)]:
        mark_fitting(plan, [device(kind, gib)])
        assert own["fits"] is fits
    refuse_too_large(two, plan, [device("cpu", 14)])
    with pytest.raises(InvalidSpec, match=r"about 14\.0 GiB"):
        refuse_too_large(two, plan, [device("cpu", 13)])
    with pytest.raises(InvalidSpec, match=r"about 6\.0 GiB"):
        refuse_too_large(two, plan, [device("cuda", 5)])


def test_the_rows_of_a_job_on_cuda_need_the_memory_of_the_host():
    """2 GiB for the network on the device, 8 of rows in each process, 4 for checkpoints."""
    memory = {"total_bytes": 14 * GIB, "checkpoint_bytes": 4 * GIB, "data_bytes": 8 * GIB}
    plan: dict[str, Any] = {"memory": memory, "parallel": None}
    refuse_too_large(job(), plan, [device("cuda", 2, 12)])
    refuse_too_large(job(processes=2), plan, [device("cuda", 2, 20)])
    refuse_too_large(job(), plan, [device("cuda", 2, 11), device("cuda", 2, 12)])
    refuse_too_large(job(), plan, [device("cuda", 2, 11), device("cpu", 14)])
    refuse_too_large(job(), plan, [device("cuda", 2), device("cuda", None, 12)])
    with pytest.raises(
        InvalidSpec, match=r"/data: .* 12\.0 GiB, and the largest host .* 11\.0 GiB"
    ):
        refuse_too_large(job(), plan, [device("cuda", 2, 10), device("cuda", None, 11)])
    with pytest.raises(InvalidSpec, match=r"20\.0 GiB.* 19\.0 GiB; set data.shuffle.buffer_size"):
        refuse_too_large(job(processes=2), plan, [device("cuda", 2, 19)])
    with pytest.raises(InvalidSpec, match=r"/network: .* 2\.0 GiB"):
        refuse_too_large(job(), plan, [device("cuda", 1, 12)])
    sharded = plan | {"parallel": {"host_bytes": 28 * GIB, "strategies": []}}  # each saves a part
    refuse_too_large(job(processes=2), sharded, [device("cuda", 2, 24)])
    with pytest.raises(InvalidSpec, match=r"/data: .* 24\.0 GiB, and the largest host"):
        refuse_too_large(job(processes=2), sharded, [device("cuda", 2, 23)])
    large = plan | {"memory": memory | {"total_bytes": 38 * GIB}}
    refuse_too_large(job(), large, [device("cuda", 34, 64)])
    with pytest.raises(InvalidSpec, match=r"/network: .* 34\.0 GiB, and the largest device"):
        refuse_too_large(job(), large, [device("cuda", 33, 64)])  # its rows are moved there


OFFLOADED = {
    "strategy": "fsdp",
    "cpu_offload": True,
    "memory": {"total_bytes": 20 * GIB, "checkpoint_bytes": 4 * GIB, "offloaded_bytes": 14 * GIB},
    "host_bytes": 40 * GIB,
}


def test_what_is_offloaded_needs_the_memory_of_the_host():
    """2 GiB on the device, 40 on the host for both processes."""
    own = {**OFFLOADED, "processes": 2, "strategies": []}
    plan: dict[str, Any] = {"memory": own.pop("memory"), "parallel": own}
    two = job(processes=2, strategy="fsdp")
    refuse_too_large(two, plan, [device("cuda", 2, 40)])
    refuse_too_large(two, plan, [device("cuda", 2)])
    with pytest.raises(InvalidSpec, match=r"/network: .* 2\.0 GiB, .* largest device .* 1\.0"):
        refuse_too_large(two, plan, [device("cuda", 1, 40)])
    with pytest.raises(
        InvalidSpec,
        match=r"/parallel/cpu_offload: .* 40\.0 GiB, .* largest host .* 39\.0 GiB; remove cpu_off",
    ):
        refuse_too_large(two, plan, [device("cuda", 2, 39)])


def test_a_job_that_fits_only_if_it_is_offloaded_is_pointed_to_that_and_auto_is_not_it():
    plan = plan_of(data=6, fsdp=3)
    plan["parallel"]["strategies"].append(dict(OFFLOADED))
    for host, fits in ((40, True), (39, False)):
        mark_fitting(plan, [device("cuda", 2, host)])
        assert [one["fits"] for one in plan["parallel"]["strategies"]] == [False, False, fits]
        assert choose_strategy(job(processes=2, strategy="auto"), plan) is None
        says = "GiB; set parallel.strategy to fsdp, and parallel.cpu_offload to true, or make"
        with pytest.raises(InvalidSpec, match=says if fits else "GiB; make the network"):
            refuse_too_large(job(processes=2), plan, [device("cuda", 2, host)])
    mark_fitting(plan, [device("cuda", 3, 40)])  # now without offloading too
    with pytest.raises(InvalidSpec, match=r"GiB; set parallel\.strategy to fsdp, or make"):
        refuse_too_large(job(processes=2), plan, [device("cuda", 3, 40)])


def test_the_rows_of_a_job_on_several_devices_need_the_memory_of_the_host():
    memory = {"total_bytes": 20 * GIB, "checkpoint_bytes": 4 * GIB, "data_bytes": 2 * GIB}
    part = {"device": 0, "memory": {"total_bytes": 8 * GIB}}
    plan: dict[str, Any] = {"memory": memory, "parallel": {"devices": [part]}}
    refuse_too_large(job(), plan, [device("cuda", 8, 6)])
    refuse_too_large(job(), plan, [device("cuda", 8)])
    with pytest.raises(InvalidSpec, match=r"/data: .* 6\.0 GiB, and the largest host .* 5\.0 GiB"):
        refuse_too_large(job(), plan, [device("cuda", 8, 5)])
