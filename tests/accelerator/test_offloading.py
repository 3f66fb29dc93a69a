"""Parts of a network in host memory: jobs of several processes that offload what fsdp keeps."""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.conftest import digits, server  # noqa: F401 - fixtures
from tests.unit.engine.parallel_jobs import (
    ADAM,
    OF_PARAMETERS,
    VALIDATION,
    VARIANTS,
    assert_same_losses,
    pair,
)
from tests.unit.engine.processes import run_processes
from tests.unit.engine.runs import losses, run
from worker.processes.fork_server import ForkServerClient

BOTH = {"data": 2, "fsdp": 2}


def offloaded(job: dict[str, Any]) -> dict[str, Any]:
    """The same job with its parts in host memory."""
    parallel = {**job["parallel"], "cpu_offload": True}
    return {**copy.deepcopy(job), "parallel": parallel, "devices": {"type": "cuda"}}


@pytest.mark.parametrize(
    ("num", "strategy", "variant"),
    [
        (2, "fsdp", "sgd"),
        (2, "fsdp", "adam"),
        (2, "fsdp", "clipping"),
        (2, "fsdp", "clip between"),
        (2, "fsdp", "clip by norm"),
        (2, "fsdp", "accumulation"),
        (2, "fsdp", "ema"),
        (2, "fsdp", "window"),
        (2, "fsdp", "guards"),
        (3, "fsdp", "adam"),
        (4, BOTH, "clipping"),
    ],
    ids=str,
)
def test_losses_are_those_of_fsdp_and_of_one_process(
    num: int,
    strategy: Any,
    variant: str,
    server: ForkServerClient,  # noqa: F811
    digits: Path,  # noqa: F811
    tmp_path: Path,
):
    more = copy.deepcopy({**VARIANTS, **OF_PARAMETERS}[variant])
    several, alone = pair(num, 66 if num == 3 else 64, strategy, data=VALIDATION, **more)
    mine = run_processes(server, tmp_path / "a", offloaded(several), digits)
    sharded = run_processes(server, tmp_path / "b", several, digits)
    assert_same_losses(mine, run(tmp_path / "c", alone, digits))
    assert losses(mine) == pytest.approx(losses(sharded), rel=1e-6)
