"""Several processes write one checkpoint: the files are those that one process writes."""

import copy
import hashlib
import itertools
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.checkpoint import checkpoint
from engine.checkpoint.shared_writing import Agreed, SharedWriter
from engine.core.precision import dtype_name
from engine.core.safetensors_writer import layout_of, pieces_of
from engine.core.shards import Place
from engine.core.snapshot import Snapshot
from engine.distributed.group import Group
from tests.unit.engine.parallel_jobs import (
    ADAM,
    SMOOTH,
    VALIDATION,
    network,
    pair,
    weights,
)
from tests.unit.engine.processes import fork_server_in, run_processes
from tests.unit.engine.runs import losses, of_type, run
from worker.processes.fork_server import ForkServerClient


def own_part(tensor: Tensor, indices: list[list[int]]) -> tuple[Tensor, Place]:
    """The part with the given indices along each axis, and its place."""
    own = tuple(torch.tensor(one, dtype=torch.int64) for one in indices)
    part = tensor
    for axis, rows in enumerate(own):
        part = part.index_select(axis, rows)
    return part.contiguous(), Place(tensor.shape, own)


def parts_of(tensor: Tensor, divided: list[list[list[int]]]) -> list[tuple[Tensor, Place]]:
    """The parts along all axes, of the groups of indices along each."""
    return [own_part(tensor, [*some]) for some in itertools.product(*divided)]


def every(size: int) -> list[list[int]]:
    """An axis that is not divided."""
    return [[*range(size)]]


GENERATOR = torch.Generator().manual_seed(0)
WHOLE: dict[str, tuple[Tensor, list[list[list[int]]]]] = {
    "rows": (torch.randn(6, 5, generator=GENERATOR), [[[0, 1, 2], [3, 4, 5]], every(5)]),
    "columns": (torch.randn(3, 8, generator=GENERATOR), [every(3), [[0, 1, 2, 3], [4, 5, 6, 7]]]),
    "of blocks": (
        torch.randn(12, 2, 3, generator=GENERATOR).bfloat16(),
        [[[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]], every(2), every(3)],
    ),
    "uneven": (torch.randn(3, generator=GENERATOR).double(), [[[0, 1, 2], []]]),
    "inner": (
        torch.arange(2 * 4 * 3).view(2, 4, 3),
        [every(2), [[0, 2], [1, 3]], every(3)],
    ),
    "both axes": (torch.arange(16).view(4, 4).half(), [[[0, 1, 2, 3]], [[0, 3], [1, 2]]]),
}


def stores(directory: Path, size: int) -> list[Group]:
    return [
        Group(rank, size, store=dist.FileStore(str(directory / "store"), size))
        for rank in range(size)
    ]


def shares(num: int) -> tuple[list[Snapshot], dict[str, Tensor]]:
    """The snapshots of two processes that have different parts of the same tensors, and these."""
    whole = {name: tensor for name, (tensor, _) in WHOLE.items()}
    whole["of the first"] = torch.tensor(2.5)
    found: list[Snapshot] = []
    divided = {name: parts_of(tensor, how) for name, (tensor, how) in WHOLE.items()}
    for rank in range(num):
        tensors = {name: parts[rank][0] for name, parts in divided.items()}
        places = {name: parts[rank][1] for name, parts in divided.items()}
        if not rank:
            tensors["of the first"] = whole["of the first"]
        about = {"step": 3}
        found.append(
            Snapshot(
                about,
                {"model": tensors, "rest": {}},
                {"model": {}, "rest": {"a": 1}},
                {"model": places, "rest": {}},
            )
        )
    return found, whole


def agreed_on(whole: dict[str, Tensor]) -> Agreed:
    layout = layout_of({name: (dtype_name(x.dtype), [*x.shape]) for name, x in whole.items()})
    return Agreed(0, False, {"model": layout})


def test_the_bytes_are_those_that_one_process_writes(tmp_path: Path):
    (first, second), whole = shares(2)
    groups, agreed = stores(tmp_path, 2), agreed_on(whole)
    other = threading.Thread(target=SharedWriter(groups[1]).write_own, args=(second, agreed))
    other.start()
    write = SharedWriter(groups[0]).write
    files = checkpoint.write(tmp_path / "c", first, lambda to, of: write(agreed, to, of))
    other.join(30)
    data = (tmp_path / "c/model.safetensors").read_bytes()
    assert data == b"".join(pieces_of(whole))
    assert files["model.safetensors"] == {
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    saved = checkpoint.read(tmp_path / "c")  # verifies all digests
    assert saved.parts["rest"] == {"a": 1}
    for name, tensor in whole.items():
        assert torch.equal(saved.parts["model"][name], tensor)


def test_what_another_process_cannot_write_is_named_and_no_checkpoint_is_left(tmp_path: Path):
    (first, second), whole = shares(2)
    groups, agreed = stores(tmp_path, 2), agreed_on(whole)
    second.tensors["model"]["unknown"] = torch.zeros(3)
    other = threading.Thread(target=SharedWriter(groups[1]).write_own, args=(second, agreed))
    other.start()
    write = SharedWriter(groups[0]).write
    with pytest.raises(OSError, match=r"process 1 could not write its part: KeyError\('unknown'\)"):
        checkpoint.write(tmp_path / "c", first, lambda to, of: write(agreed, to, of))
    other.join(30)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_others_write_nothing_if_process_0_gives_up(tmp_path: Path):
    (_, second), whole = shares(2)
    groups, agreed = stores(tmp_path, 2), agreed_on(whole)
    other = threading.Thread(target=SharedWriter(groups[1]).write_own, args=(second, agreed))
    other.start()
    SharedWriter(groups[0]).give_up(agreed)
    other.join(30)
    assert not other.is_alive()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline"])
def test_each_process_writes_while_training_goes_on(
    strategy: str, server: ForkServerClient, digits: Path, tmp_path: Path
):
    """One process takes seconds for its part; the steps after the boundary do not wait for it."""
    job, _ = job_of(strategy)
    with fork_server_that("checkpoint.part=pause:1.5@1", tmp_path) as slow:
        records = run_processes(slow, tmp_path / "slow", job, digits)
    kinds = [(x["type"], x.get("step")) for x in records if x["type"] in ("checkpoint", "metrics")]
    assert kinds.index(("checkpoint", 4)) > kinds.index(("metrics", 6))
    plain = run_processes(server, tmp_path / "plain", job, digits)
    assert losses(records) == losses(plain)
    for name, tensor in weights(tmp_path / "plain", 4).items():
        assert torch.equal(weights(tmp_path / "slow", 4)[name], tensor)


@contextmanager
def fork_server_that(failpoint: str, directory: Path) -> Generator[ForkServerClient]:
    """A fork server of whose processes the first to reach a failpoint does what it says."""
    (directory / "once").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAILPOINTS", failpoint)
        patch.setenv("FAILPOINTS_ONCE", str(directory / "once"))
        with fork_server_in(directory) as found:
            yield found


EACH = {"every_steps": 3}


def job_of(strategy: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job of two processes and the same job of one."""
    more = {"optimizer": ADAM, "stop": {"steps": 12}, "checkpoint": {"every_steps": 4}, **more}
    job, alone = pair(2, strategy=strategy, **more)
    if strategy == "pipeline":
        job = copy.deepcopy(job)
        job["data"]["batch_size"] = 64
        for number, layer in enumerate(job["network"]["layers"]):
            layer["stage"] = int(number > 1)
        job["parallel"]["micro_batches"] = 2
    return job, alone


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline"])
def test_the_files_name_the_tensors_and_shapes_of_one_process(
    strategy: str, server: ForkServerClient, digits: Path, tmp_path: Path
):
    job, alone = job_of(strategy)
    run_processes(server, tmp_path / "several", job, digits)
    run(tmp_path / "one", alone, digits)
    for name in ("model", "optimizer"):
        kinds = [
            header_of(tmp_path / where / f"checkpoints/step-12/{name}.safetensors")
            for where in ("several", "one")
        ]
        assert kinds[0] == kinds[1]
        assert len(kinds[0]) >= 4


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


@pytest.mark.long
def test_no_room_in_one_process_ends_nothing_and_the_next_save_works(digits: Path, tmp_path: Path):
    job, _ = job_of("fsdp")
    with fork_server_that("checkpoint.part=raise@1", tmp_path) as full:
        records = run_processes(full, tmp_path / "full", job, digits)
    (dropped,) = of_type(records, "dropped")
    assert dropped["what"].startswith("checkpoint")
    assert [record["step"] for record in of_type(records, "checkpoint")] == [8, 12]
    assert sorted(path.name for path in (tmp_path / "full/checkpoints").iterdir()) == [
        "step-12",
        "step-8",
    ]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_best_state_that_each_process_holds_is_written_later(
    strategy: str, server: ForkServerClient, digits: Path, tmp_path: Path
):
    """The loss only falls, so that of the first evaluation is the largest, called the best here."""
    wide = {"type": "Linear", "args": {"out_features": 1500}}
    layers = [{"name": "flat", "type": "Flatten"}, {"name": "wide", **wide}, SMOOTH[4]]
    job, _ = job_of(strategy, network=network(*layers), evaluate={"every_steps": 3})
    job["data"] |= VALIDATION
    best = {"metric": "validation/loss", "mode": "max"}
    held, named = {**job, "checkpoint": {"keep_best": best}}, {**job, "checkpoint": EACH}
    records = run_processes(server, tmp_path / "held", held, digits)
    run_processes(server, tmp_path / "named", named, digits)
    assert [record["step"] for record in of_type(records, "checkpoint")] == [3, 12]
    for name in ("model", "optimizer"):
        files = [tmp_path / x / f"checkpoints/step-3/{name}.safetensors" for x in ("held", "named")]
        assert files[0].read_bytes() == files[1].read_bytes()
