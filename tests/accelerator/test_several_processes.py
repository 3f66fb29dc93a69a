"""Jobs of several processes, each with a simulated device, train as one process does there."""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.parallel_jobs import (
    ADAM,
    ALL_KINDS,
    VALIDATION,
    assert_same_losses,
    pair,
    table_of,
)
from tests.unit.engine.processes import run_processes
from tests.unit.engine.runs import run
from worker.processes.fork_server import ForkServerClient

METRICS = [
    {"type": "accuracy", "inputs": ["fc", "label"]},
    {"type": "mean", "inputs": ["fc"], "name": "mean_of_fc", "every": 1},
]


@pytest.mark.parametrize("strategy", ["data", "fsdp", "tensor", "pipeline"])
def test_losses_metrics_and_statistics_are_those_of_one_process(
    strategy: str,
    server: ForkServerClient,
    digits: Path,
    tmp_path: Path,
):
    probes = [{"layers": ["*"], "kinds": ALL_KINDS, "want": ["stats"], "every": 4}]
    more: dict[str, Any] = {"optimizer": ADAM, "stop": {"steps": 10}, "probes": probes}
    more |= {"metrics": METRICS, "grad_clip": {"type": "global_norm", "max": 0.5}}
    several, alone = pair(2, strategy=strategy, data=VALIDATION, **more)
    if strategy == "pipeline":
        several = copy.deepcopy(several)
        several["data"]["batch_size"] = 64
        several["parallel"] |= {"schedule": "gpipe", "micro_batches": 1}
        for number, layer in enumerate(several["network"]["layers"]):
            layer["stage"] = int(number > 1)
    mine = run_processes(server, tmp_path / "a", several, digits)
    theirs = run(tmp_path / "b", alone, digits)
    assert_same_losses(mine, theirs)
    found, expected = table_of(mine), table_of(theirs)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        for number, figure in enumerate(values[:6]):  # those that no single value decides
            assert found[key][number] == pytest.approx(figure, rel=2e-3, abs=2e-5), key
