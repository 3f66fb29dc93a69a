"""Parts of a network in host memory: jobs of several processes that offload what fsdp keeps."""

import copy
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from engine.core import shards
from engine.distributed.group import connect
from engine.learner.learner import learner_of
from engine.losses.losses import loss_of
from glasshouse.spec import TrainJob, parse_job
from tests.unit.engine.parallel_jobs import (
    ADAM,
    ALL_KINDS,
    OF_PARAMETERS,
    SMOOTH,
    VALIDATION,
    VARIANTS,
    assert_resumes,
    assert_same_losses,
    network,
    of_tokens,
    pair,
    rarely,
    series,
    table_of,
    token_table,
    weights,
)
from tests.unit.engine.processes import finish, forking, run_processes, start
from tests.unit.engine.runs import captured, losses, of_type, planned, run, write_table
from worker.processes.fork_server import ForkServerClient

BOTH = {"data": 2, "fsdp": 2}
CONV = {
    **SMOOTH[0],
    "args": {**SMOOTH[0]["args"], "bias": False},
}  # of a bias, only the noise counts
NORMALIZED = network(CONV, {"name": "norm", "type": "SyncBatchNorm"}, *SMOOTH[1:])
OWN = {
    "buffers": {"network": NORMALIZED, "optimizer": ADAM, "average": {"type": "ema", "decay": 0.9}},
    "bfloat16": {"precision": "bfloat16", "optimizer": ADAM, "stop": {"steps": 20}},
}


def offloaded(job: dict[str, Any]) -> dict[str, Any]:
    """The same job with its parts in host memory."""
    parallel = {**job["parallel"], "cpu_offload": True}
    return {**copy.deepcopy(job), "parallel": parallel, "devices": {"type": "cuda"}}


@pytest.mark.parametrize(
    ("num", "strategy", "variant"),
    [
        rarely(2, "fsdp", "sgd"),
        (2, "fsdp", "adam"),
        rarely(2, "fsdp", "clipping"),
        rarely(2, "fsdp", "clip between"),
        rarely(2, "fsdp", "clip by norm"),
        rarely(2, "fsdp", "accumulation"),
        (2, "fsdp", "ema"),
        rarely(2, "fsdp", "window"),
        (2, "fsdp", "guards"),
        (2, "fsdp", "buffers"),
        (2, "fsdp", "bfloat16"),
        rarely(3, "fsdp", "adam"),
        (4, BOTH, "clipping"),
    ],
    ids=str,
)
def test_losses_are_those_of_fsdp_and_of_one_process(
    num: int,
    strategy: Any,
    variant: str,
    server: ForkServerClient,
    digits: Path,
    tmp_path: Path,
):
    more = copy.deepcopy({**VARIANTS, **OF_PARAMETERS, **OWN}[variant])
    several, alone = pair(num, 66 if num == 3 else 64, strategy, data=VALIDATION, **more)
    mine = run_processes(server, tmp_path / "a", offloaded(several), digits)
    sharded = run_processes(server, tmp_path / "b", several, digits)
    if variant != "bfloat16":
        assert_same_losses(mine, run(tmp_path / "c", alone, digits))
    assert losses(mine) == losses(sharded)


@pytest.mark.parametrize(
    ("num", "strategy"), [rarely(2, "fsdp"), rarely(3, "fsdp"), (4, BOTH)], ids=str
)
def test_what_probes_see_is_what_they_see_without_offloading(
    num: int,
    strategy: Any,
    server: ForkServerClient,
    digits: Path,
    tmp_path: Path,
):
    """Every statistic and every value, also of single processes and of evaluations."""
    want = ["stats", "full", "histogram"]
    probes = [
        {"layers": ["*"], "kinds": ALL_KINDS, "want": want, "every": 1, "ranks": "all"},
        {"layers": ["*"], "kinds": ["output"], "phase": "evaluate", "every": 1},
        {"layers": ["*"], "kinds": ALL_KINDS, "want": ["stats"], "on": "nonfinite"},
    ]
    metrics = [
        {"type": "l2_ratio", "inputs": ["fc.weight/update", "fc.weight/param"], "every": 1},
        {"type": "l2", "inputs": ["fc.weight/param_grad"], "every": 1},
    ]
    more: dict[str, Any] = {"probes": probes, "stop": {"steps": 4}, "optimizer": ADAM}
    several, _ = pair(num, 60, strategy, data=VALIDATION, metrics=metrics, **more)
    mine = run_processes(server, tmp_path / "a", offloaded(several), digits)
    theirs = run_processes(server, tmp_path / "b", several, digits)
    found, expected = table_of(mine), table_of(theirs)
    assert {key[3] for key in found} == {*ALL_KINDS}
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-5, abs=1e-7), key
    for one, other in zip(series(mine), series(theirs), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    whole, others = captured(mine, tmp_path / "a"), captured(theirs, tmp_path / "b")
    assert whole.keys() == others.keys()
    for key, tensor in others.items():
        torch.testing.assert_close(whole[key], tensor, rtol=1e-5, atol=1e-7, msg=str(key))


KINDS: dict[str, tuple[int, Any, bool]] = {
    "offloaded": (2, "fsdp", True),
    "sharded": (2, "fsdp", False),
    "alone": (1, "data", False),
    "offloaded in copies": (4, BOTH, True),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("offloaded", "offloaded"),
        ("offloaded", "sharded"),
        rarely("sharded", "offloaded"),
        rarely("offloaded", "alone"),
        ("alone", "offloaded in copies"),
    ],
)
def test_a_job_resumes_with_offloading_or_without(
    first: str,
    second: str,
    server: ForkServerClient,
    digits: Path,
    tmp_path: Path,
):
    """Bit for bit with it, dropout included; else up to rounding."""
    drop = [{"name": "drop", "type": "Dropout", "args": {"p": 0.25}}] * (first == second)
    layers = [*SMOOTH[:-1], *drop, SMOOTH[-1]]
    more: dict[str, Any] = {"network": network(*layers), "optimizer": ADAM, "stop": {"steps": 20}}
    more |= {"checkpoint": {"every_steps": 7}, "average": {"type": "ema", "decay": 0.9}}

    def at(directory: Path, is_second: bool, **more_of_run: Any) -> list[dict[str, Any]]:
        num, strategy, offloads = KINDS[second if is_second else first]
        several, alone = pair(num, 64, strategy, **copy.deepcopy(more))
        if num == 1:
            return run(directory, alone, digits, **more_of_run)
        job = offloaded(several) if offloads else several
        return run_processes(server, directory, job, digits, **more_of_run)

    assert_resumes(at, tmp_path, is_alike=first == second)
    about = json.loads((tmp_path / "whole/checkpoints/step-7/state.json").read_text())
    assert about["device"] == "simulated"


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "Adam", "args": {"lr": 0.01, "fused": True}},
        rarely({"type": "AdamW", "args": {"lr": 0.01, "foreach": True}}),
        rarely({"type": "Adagrad", "args": {"lr": 0.01}}),
        rarely({"type": "SGD", "args": {"lr": 0.05}, "l1": 0.001}),
    ],
    ids=str,
)
def test_optimizers_run_on_the_host(
    optimizer: dict[str, Any],
    server: ForkServerClient,
    digits: Path,
    tmp_path: Path,
):
    several, alone = pair(2, stop={"steps": 20}, optimizer=optimizer, strategy="fsdp")
    found = run_processes(server, tmp_path / "a", offloaded(several), digits)
    assert_same_losses(found, run(tmp_path / "b", alone, digits))


@pytest.mark.parametrize("name", ["transformer"])
@pytest.mark.parametrize(
    ("num", "strategy"), [rarely(2, "fsdp"), (4, {"fsdp": 2, "tensor": 2})], ids=str
)
def test_blocks_and_divided_layers_are_offloaded(
    num: int,
    strategy: Any,
    name: str,
    server: ForkServerClient,
    tmp_path: Path,
):
    table = token_table(tmp_path / "t")
    more: dict[str, Any] = {"grad_clip": {"type": "global_norm", "max": 0.5}, "stop": {"steps": 20}}
    several, alone = pair(num, 64, strategy, **of_tokens(name), **more)
    found = run_processes(server, tmp_path / "a", offloaded(several), table)
    assert_same_losses(found, run(tmp_path / "b", alone, table))


@pytest.mark.parametrize("args", [{}, {"fused": True}], ids=str)
def test_a_skipped_step_changes_no_weight(
    args: dict[str, Any],
    server: ForkServerClient,
    tmp_path: Path,
):
    """The 2nd of 3 steps has a NaN. The gradients are on the host, the loss is on the device."""
    rows = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    rows[45, 3] = torch.nan
    columns = {"x": rows.numpy(), "label": (torch.arange(96) % 4).numpy()}
    table = write_table(tmp_path / "t", columns, {"train": slice(0, 96)})
    fields = {"x": {"type": "dense", "fill": "NaN"}, "label": {"type": "integer", "dim": 4}}
    job, _ = pair(
        2,
        32,
        "fsdp",
        network=network({"name": "fc", "type": "Linear", "args": {"out_features": 4}}),
        data={"fields": fields, "shuffle": {"enabled": False}},
        optimizer={"type": "Adam", "args": {"lr": 0.1, **args}},
        stop={"steps": 3},
        checkpoint={"every_steps": 1, "keep_last": 3},
        guards={"nonfinite": {"action": "skip_step"}},
    )
    records = run_processes(server, tmp_path / "a", offloaded(job), table)
    first, second, third = (weights(tmp_path / "a", step)["fc.weight"] for step in (1, 2, 3))
    assert torch.equal(first, second)
    assert third.isfinite().all()
    assert not torch.equal(second, third)
    [finding] = of_type(records, "finding")
    assert (finding["action"], finding["step"], finding["layer"]) == ("skipped", 1, "x")
    job["guards"] = {"nonfinite": {"action": "fail"}}
    ended = finish(start(server, tmp_path / "b", offloaded(job), table), tmp_path / "b")
    assert [item[-1]["error"]["code"] for item in ended] == ["non_finite"] * 2
    assert [item[-1]["error"]["step"] for item in ended] == [1, 1]
    assert not (tmp_path / "b/checkpoints/step-2").exists()


# --- where the parts are -------------------------------------------------------------------------


WIDE = network(
    {"name": "flat", "type": "Flatten"},
    *(
        {"name": f"l{number}", "type": "Linear", "args": {"out_features": 512}}
        for number in range(9)
    ),
    {"name": "norm", "type": "BatchNorm1d"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
)
LAYER_BYTES = 4 * (512 * 512 + 512)
WIDE_BYTES = 8 * LAYER_BYTES + 4 * (64 * 512 + 512 + 2 * 512 + 512 * 10 + 10)


def _with_device() -> Any:
    """Give this process the first simulated device, as a rank has one; return its module."""
    module = importlib.import_module("tests.accelerator.simulated").module
    importlib.import_module("tests.accelerator.process_group").register()
    torch.accelerator.set_device_index(0)
    torch.set_num_threads(1)
    return module


def _look(rank: int, store: Path, found: Any, text: str) -> None:
    """Make two steps of a job in a process; send where everything is."""
    simulated = _with_device()
    job = parse_job(text)
    assert isinstance(job, TrainJob)
    device = torch.device("simulated", 0)
    if job.parallel.cpu_offload:
        simulated.set_capacity(6 * LAYER_BYTES)
    learner = learner_of(job, device, connect(rank, 2, store, device=device))
    batch = {"image": torch.rand(8, 1, 8, 8).to(device), "label": torch.arange(8).to(device)}
    assert learner.parallel is not None
    graded, num_graded = [""], 0
    for _ in range(2):
        values = learner.parallel.forward(batch, is_last=True)
        loss_of(learner.loss_fn, values).total.backward()
        gradients = [item.grad for item in learner.network.parameters() if item.grad is not None]
        graded, num_graded = (
            sorted({shards.own_part(x).device.type for x in gradients}),
            len(gradients),
        )
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)
        del values, gradients
        torch.accelerator.synchronize()
    parameters = [*learner.network.parameters()]
    state = [x for kept in learner.optimizer.state.values() for x in kept.values() if x.dim()]
    pinned = [shards.own_part(x).is_pinned() for x in parameters if shards.own_part(x).numel()]
    assert learner.averages is not None
    learner.averages.update(1)
    means = learner.averages.means()
    found.put(
        {
            "parameters": sorted({shards.own_part(x).device.type for x in parameters}),
            "gradients": graded,
            "state": sorted({shards.own_part(x).device.type for x in state}),
            "means": sorted({shards.own_part(x).device.type for x in means.values()}),
            "buffers": sorted({x.device.type for x in learner.network.buffers()}),
            "is_pinned": all(pinned),
            "num": [len(parameters), num_graded, len(state)],
            "held_bytes": simulated.memory_allocated(),
        }
    )


def _run(run_one: Callable[..., None], rank: int, store: Path, found: Any, *more: Any) -> None:
    """Run it and end at once: threads of the group and of the device may wait for the other."""
    run_one(rank, store, found, *more)
    found.close()
    found.join_thread()
    os._exit(0)


def _in_processes(run_one: Callable[..., None], directory: Path, *more: Any) -> list[Any]:
    """What two processes of a group send: ``run_one(rank, store, queue, *more)``."""
    context = forking()
    directory.mkdir()
    found = context.Queue()
    ranks = [
        context.Process(target=_run, args=(run_one, rank, directory / "store", found, *more))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        return [found.get(timeout=120) for _ in ranks]
    finally:
        for rank in ranks:
            rank.join(60)
            rank.kill()


def _looked_at(job: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    return _in_processes(_look, directory, json.dumps(planned(job)["spec"]))


def test_parts_are_in_host_memory_and_the_device_never_has_all_of_them(tmp_path: Path):
    """With offloading the network trains on a device that is too small for its parameters."""
    more: dict[str, Any] = {"network": WIDE, "optimizer": ADAM, "average": {"type": "ema"}}
    several, _ = pair(2, strategy="fsdp", **more)
    for one in _looked_at(offloaded(several), tmp_path / "a"):
        for what in ("parameters", "gradients", "state"):
            assert one[what] == ["cpu"], what
        assert one["means"] == ["cpu", "simulated"]  # of parameters, and of buffers
        assert one["buffers"] == ["simulated"]
        assert one["is_pinned"]
        num, num_graded, num_state = one["num"]
        assert num == num_graded == num_state // 2 == 22
        assert one["held_bytes"] < 64 * 1024  # buffers, and the rows
    for one in _looked_at(several, tmp_path / "b"):
        assert one["parameters"] == one["gradients"] == one["state"] == ["simulated"]
        # half of the parameters, of their averages and of both moments
        assert one["held_bytes"] > 4 * WIDE_BYTES // 2


def test_averages_overwrite_no_part_that_is_still_to_be_copied(tmp_path: Path):
    """The copies are queued as fully_shard does. The process group here waits for them, and NCCL
    does not."""
    several, _ = pair(2, strategy="fsdp", average={"type": "ema", "decay": 0.5})
    text = json.dumps(planned(offloaded(several))["spec"])
    for copied, means, weights_after in _in_processes(_copy, tmp_path / "a", text):
        assert copied == means
        assert copied != weights_after


def _copy(rank: int, store: Path, found: Any, text: str) -> None:
    _with_device()
    job = parse_job(text)
    assert isinstance(job, TrainJob)
    device = torch.device("simulated", 0)
    learner = learner_of(job, device, connect(rank, 2, store, device=device))
    averages, parameters = learner.averages, [*learner.network.parameters()]
    assert averages is not None
    averages.update(1)
    with torch.no_grad():
        for item in parameters:
            shards.own_part(item).add_(1)
    means = [shards.own_part(x).tolist() for x in averages.means().values()]
    with averages.applied():
        queued = [shards.own_part(x).to(device, non_blocking=True) for x in parameters]
    after = [shards.own_part(x).tolist() for x in parameters]
    found.put(([x.tolist() for x in queued], means, after))


def test_a_part_of_a_whole_tensor_is_where_the_other_part_is(tmp_path: Path):
    """Also if torch moves it to the device of the mesh in between."""
    seen = sorted(_in_processes(_cut, tmp_path / "a"))
    rows = torch.arange(10.0).reshape(5, 2)
    assert seen == [
        (0, "cpu", "simulated", rows[:3].tolist(), rows.tolist()),
        (1, "cpu", "simulated", rows[3:].tolist(), rows.tolist()),
    ]


def _cut(rank: int, store: Path, found: Any) -> None:
    _with_device()
    connect(rank, 2, store, device=torch.device("simulated", 0))
    layer, mesh = torch.nn.Linear(2, 5, bias=False), init_device_mesh("simulated", (2,))
    fully_shard(layer.to("simulated"), mesh=mesh, offload_policy=CPUOffloadPolicy())
    rows, like = torch.arange(10.0).reshape(5, 2), layer.weight
    assert shards.is_offloaded(like)
    part = shards.own_part(shards.sharded_like(rows, like))
    whole = shards.whole(shards.sharded_like(rows, like))
    kind = shards.computing_type(like)
    found.put((rank, part.device.type, kind, part.tolist(), whole.tolist()))
