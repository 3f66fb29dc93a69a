"""Inference that is killed, or paused, and continues with what it has stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models.jobs import checkpoints, jobs, pausing
from models.observations import outputs
from models.storage import datasets
from tests.integration.worker.harness import Harness, train_spec
from tests.waiting import until

NUM_ROWS = 20_000


def rows(harness: Harness) -> tuple[str, torch.Tensor]:
    """A dataset with more rows than a part has, and its rows."""
    dataset = harness.dataset(NUM_ROWS)
    with harness.database.read() as tx:
        directory = harness.artifacts.local(datasets.get(tx, dataset, None).key)
    return dataset, torch.from_numpy(np.load(directory / "train" / "0.npy"))


def inference(harness: Harness, dataset: str, **changes: Any) -> tuple[dict[str, Any], Path]:
    """The spec of an inference, and the weights that it uses."""
    trained = harness.submit(train_spec(harness.dataset(), stop={"steps": 2}))
    assert harness.wait(trained).state == "succeeded", harness.logs()
    with harness.database.read() as tx:
        checkpoint = checkpoints.of_job(tx, trained)[-1]
    fields = {"x": {"type": "dense", "shape": [4]}}
    spec: dict[str, Any] = {
        "kind": "infer",
        "checkpoint": checkpoint.id,
        "data": {"dataset": dataset, "split": "train", "batch_size": 50, "fields": fields},
        "outputs": ["fc2"],
        "fields": ["value", "id"],
        "devices": {"type": "cpu", "threads": 1},
    }
    weights = harness.artifacts.local(checkpoint.key) / "model.safetensors"
    return spec | changes, weights


def check(harness: Harness, job_id: str, weights: Path, x: torch.Tensor) -> None:
    """The outputs are those of torch by hand, and nothing else is left of the job's files."""
    with harness.database.read() as tx:
        found = {row.name: row.key for row in outputs.of_job(tx, job_id)}
    assert sorted(found) == ["outputs.safetensors", "predictions.csv"]
    tensors = load_file(harness.artifacts.local(found["outputs.safetensors"]))
    w = load_file(weights)
    scores = torch.relu(x @ w["fc1.weight"].T + w["fc1.bias"]) @ w["fc2.weight"].T + w["fc2.bias"]
    torch.testing.assert_close(tensors["fc2/value"], scores)
    assert torch.equal(tensors["fc2/id"], tensors["fc2/value"].argmax(1))
    folder = harness.settings.artifacts / "jobs" / job_id
    until(lambda: sorted(path.name for path in folder.rglob("*.*")) == sorted(found))


def num_parts(harness: Harness, job_id: str) -> int:
    with harness.database.read() as tx:
        return outputs.num_parts(tx, job_id)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_inference_computes_only_what_is_not_stored(
    harness: Harness, points: Callable[[str], Path], processes: int
):
    # five parts: of these another attempt stores three, or it would be killed too
    once = points("infer.part_stored=kill@2;infer.part_stored=kill@4")
    harness.start_worker()
    dataset, x = rows(harness)
    more = {} if processes == 1 else {"parallel": {"strategy": "data", "processes": processes}}
    spec, weights = inference(harness, dataset, **more)
    job_id = harness.submit(spec)
    job = harness.wait(job_id)
    assert job.state == "succeeded", (job.error, harness.logs())
    assert len(list(once.iterdir())) == 1
    assert len(harness.attempts(job_id)) == 2
    check(harness, job_id, weights, x)


@pytest.mark.shared_worker
def test_a_paused_inference_continues_with_what_is_stored(harness: Harness):
    dataset, x = rows(harness)
    spec, weights = inference(harness, dataset)
    spec["data"]["batch_size"] = 1  # slow, so that it is seen with some parts
    job_id = harness.submit(spec)
    until(lambda: num_parts(harness, job_id) >= 1)
    with harness.database.write() as tx:
        pausing.request_pause(tx, jobs.get(tx, job_id, None))
    until(lambda: harness.job(job_id).state == "paused")
    stored = num_parts(harness, job_id)
    assert 1 <= stored < 5
    assert all(device.job is None for device in harness.devices())
    with harness.database.write() as tx:
        pausing.request_resume(tx, jobs.get(tx, job_id, None))
    harness.ring()
    job = harness.wait(job_id)
    assert job.state == "succeeded", (job.error, harness.logs())
    first, second = harness.attempts(job_id)
    assert (first.exit_kind, second.exit_kind) == ("paused", "succeeded")
    check(harness, job_id, weights, x)
