"""A whole service with jobs on a CUDA device: ``pytest tests/gpu/test_service.py -m gpu``.

Here a rank is started as in production, by the fork server in an interpreter of its own, and NVML
reports the device. ``ENGINE_DEVICE=cpu`` runs the same jobs on CPU cores.
"""

import os
import time
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.acceptance.specs import digits_example, lasting
from tests.waiting import until

KIND = os.environ.get("ENGINE_DEVICE", "cuda")
THERE, HERE = {"type": KIND}, {"type": "cpu", "threads": 1}
IS_CUDA = KIND == "cuda"
LIMIT_S = 90.0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(KIND not in ("cuda", "cpu"), reason="the service names no such device"),
    pytest.mark.skipif(IS_CUDA and not torch.cuda.is_available(), reason="no CUDA device"),
]
WHOLE = {
    "layers": ["conv1", "fc"],
    "kinds": ["output", "output_grad", "param_grad"],
    "every": 20,
    "want": ["stats", "full"],
    "max_overhead": None,
}


@pytest.fixture(scope="module")
def service() -> Generator[LocalService]:
    with LocalService.temporary() as started:
        yield started


@pytest.fixture(scope="module")
def client(service: LocalService) -> Generator[gh.Client]:
    with service.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def digits(client: gh.Client) -> str:
    return client.datasets.create(builtin="digits").id


@pytest.fixture(scope="module")
def trained(client: gh.Client, digits: str) -> gh.Job:
    """A job on the device, whose statistics are computed and whose tensors are captured there."""
    return ended(client, digits_example(digits, devices=THERE, **watched()))


@pytest.fixture(scope="module")
def twin(client: gh.Client, digits: str) -> gh.Job:
    """The same job on a CPU core."""
    return ended(client, digits_example(digits, devices=HERE, **watched()))


def watched() -> dict[str, Any]:
    """Without dropout, whose random numbers differ from device to device."""
    network = digits_example("d")["network"]
    layers = [layer for layer in network["layers"] if layer["type"] != "Dropout"]
    return {
        "network": network | {"layers": layers},
        "probes": [WHOLE],
        "stop": {"epochs": 4},
        "metrics": [{"type": "accuracy", "inputs": ["fc", "label"]}],
    }


def ended(client: gh.Client, spec: dict[str, Any]) -> gh.Job:
    """Submit a job and wait for its success; its log is shown if it fails."""
    job = client.jobs.create(spec)
    try:
        job.wait(timeout=LIMIT_S)
        times = [job.data[name] for name in ("created_at", "started_at", "ended_at")]
        print(job.id, *times)  # noqa: T201 - read with -s
        return job
    finally:
        if job.refresh().state != "succeeded":
            print(job.logs())  # noqa: T201 - shown with a failure
            job.cancel(force=True)


@pytest.mark.skipif(not IS_CUDA, reason="about the card")
def test_the_devices_list_has_the_card_and_what_the_driver_says_of_it(client: gh.Client):
    (card,) = [one for one in client.devices.list() if one.kind == "cuda"][:1]
    seen = torch.cuda.get_device_properties(0)
    assert (card.id, card.name, card.healthy) == ("cuda:0", seen.name, True)
    assert card.uuid.removeprefix("GPU-") == str(seen.uuid)
    assert card.compute_capability == f"{seen.major}.{seen.minor}"
    assert 0 <= card.memory_bytes - seen.total_memory < 0.05 * card.memory_bytes
    assert 0 < card.memory_used_bytes < card.memory_bytes
    assert 10 < card.temperature_celsius < 100
    assert 10 < card.power_watts < 1500
    assert 0 <= card.utilization_percent <= 100
    assert card.data["interconnect"]["peers"].keys() == {
        f"cuda:{number}" for number in range(1, torch.cuda.device_count())
    }
    print(card.data)  # noqa: T201 - read with -s
    (host,) = client.system()
    print(host.data)  # noqa: T201
    assert host.data["versions"]["driver"]
    assert host.data["versions"]["cuda"] == torch.version.cuda
    assert host.data["versions"]["cudnn"]
    assert host.data["versions"]["nccl"]


def test_a_job_on_the_device_computes_what_the_cpu_does(trained: gh.Job, twin: gh.Job):
    assert trained.spec()["devices"]["type"] == KIND
    mine, theirs = (one.metrics("loss").values for one in (trained, twin))
    assert mine[:5] == pytest.approx(theirs[:5], rel=1e-3)
    assert len(mine) == len(theirs) == 4 * 41
    best = [one.metrics()["validation/accuracy"]["last"] for one in (trained, twin)]
    assert min(best) > 0.93
    assert abs(best[0] - best[1]) < 0.03


def test_no_statistics_took_the_plain_path(trained: gh.Job):
    """The Triton kernel compiles in a rank, whose ``pickle`` is sealed."""
    log = trained.logs()
    assert "plain path" not in log, log
    assert "Traceback" not in log, log


@pytest.mark.parametrize("kind", ["output", "output_grad", "param_grad"])
def test_captured_tensors_are_those_of_the_cpu(kind: str, trained: gh.Job, twin: gh.Job):
    for layer in ("conv1", "fc"):
        args = ("weight",) if kind == "param_grad" else ()
        mine, theirs = (getattr(one.layers[layer], kind)(*args, step=0) for one in (trained, twin))
        assert mine.shape == theirs.shape
        apart = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
        assert apart < (1e-2 if IS_CUDA else 1e-6), (layer, apart)  # cuDNN takes TF32
        own = f"{layer}.weight" if args else layer
        assert (trained.layers[own].stats(kind)["nan"] == 0).all()
    conv1 = trained.layers["conv1"]
    values = conv1.output(step=100).astype(np.float64)
    stats = conv1.stats("output")
    place = stats.steps.tolist().index(100)
    assert stats["mean"][place] == pytest.approx(values.mean(), rel=1e-6)
    assert stats["l2"][place] == pytest.approx(np.sqrt((values**2).sum()), rel=1e-6)
    assert stats["absmax"][place] == pytest.approx(np.abs(values).max(), rel=1e-6)


def test_a_paused_job_continues_bit_for_bit(client: gh.Client, digits: str):
    job = client.jobs.create(lasting(digits, 10**6, devices=THERE, deterministic=True))
    until(lambda: job.refresh().progress.get("step"), LIMIT_S, "the first step")
    job.pause()
    until(lambda: job.refresh().state == "paused", LIMIT_S, "the pause")
    assert [one.id for one in client.devices.list() if one.job == job.id] == []
    num_steps = job.progress["step"] + 50
    job.set({"stop.steps": num_steps})
    job.resume()
    job.wait(timeout=LIMIT_S)
    assert job.paused_s > 0
    whole = ended(client, lasting(digits, num_steps, devices=THERE, deterministic=True))
    mine, theirs = (one.metrics("loss").values for one in (job, whole))
    assert mine.tolist() == theirs.tolist()
    assert all((value == whole.weights()[name]).all() for name, value in job.weights().items())


def test_inference_and_evaluation_are_those_of_the_cpu(
    client: gh.Client, trained: gh.Job, digits: str
):
    data = {"dataset": digits, "split": "test"}
    found = [client.infer(trained, data=data, devices=where) for where in (THERE, HERE)]
    assert found[0]["fc"].shape == (250, 10)
    assert found[0]["fc"] == pytest.approx(found[1]["fc"], rel=1e-3, abs=1e-3)
    assert (found[0]["fc/id"] == found[1]["fc/id"]).mean() > 0.99
    judged = [client.evaluate(trained, data, devices=where) for where in (THERE, HERE)]
    assert judged[0]["rows"] == 250
    for name in ("loss", "accuracy"):
        mine, theirs = (one["metrics"][name] for one in judged)
        assert mine == pytest.approx(theirs, rel=1e-3), name


def test_a_published_model_answers_from_the_device(client: gh.Client, trained: gh.Job, digits: str):
    client.models.publish("on-device", trained.checkpoints()[-1])
    images = np.random.default_rng(0).random((4, 1, 8, 8), np.float32)
    expected = client.infer(trained, images, devices=HERE)["fc"]
    job = client.jobs.create({"kind": "serve", "models": ["on-device"], "devices": THERE})
    try:
        until(lambda: job.refresh().state == "running", LIMIT_S, "the start of the replica")
        body = {"inputs": {"image": images.tolist()}, "fields": ["value"]}

        def predicted() -> Any:
            return client.request("POST", "/api/v1/models/on-device/predict", json=body).json()

        found = np.asarray(predicted()["outputs"]["fc/value"], np.float32)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)
        began = time.perf_counter()
        for _ in range(50):
            predicted()
        print("ms per prediction:", 20 * (time.perf_counter() - began))  # noqa: T201
    finally:
        job.cancel(force=True)


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "auto"])
def test_low_precision_trains_there(precision: str, client: gh.Client, digits: str):
    if precision == "float16" and not IS_CUDA:
        pytest.skip("float16 is for accelerators")
    changes = watched() | {"precision": precision, "stop": {"epochs": 2}}
    job = ended(client, digits_example(digits, devices=THERE, **changes))
    losses = job.metrics("loss").values
    assert np.isfinite(losses).all()
    assert losses[:10].mean() > 2 * losses[-10:].mean()
    if IS_CUDA:
        dtype = job.layers["conv1"].output(step=0).dtype.name
        assert dtype == ("float16" if precision == "float16" else "bfloat16")


@pytest.mark.skipif(not IS_CUDA, reason="about the card")
def test_what_the_job_uses_of_the_card_is_recorded(client: gh.Client, digits: str):
    job = client.jobs.create(lasting(digits, 10**6, devices=THERE))
    try:
        wanted = {"system/gpu_memory_used_bytes", "system/gpu_percent", "system/gpu_watts"}
        until(lambda: wanted <= job.refresh().metrics().keys(), LIMIT_S, "the usage of the card")
        (card,) = [one for one in client.devices.list() if one.job == job.id and one.uuid]
        assert card.state == "busy"
        assert job.metrics()["system/gpu_memory_used_bytes"]["last"] > 2**20
    finally:
        job.cancel(force=True)


@pytest.mark.skipif(not IS_CUDA, reason="about the memory of the card")
def test_more_memory_than_the_cap_is_reported(client: gh.Client, digits: str):
    spec = lasting(digits, 5, devices=THERE)
    wide = {"name": "wide", "type": "Linear", "args": {"out_features": 200_000}}  # 400 MB
    spec["network"]["layers"].insert(-1, wide)
    spec["guards"] = {"memory": {"cap_fraction": 0.004}}
    job = client.jobs.create(spec)
    with pytest.raises(gh.JobFailed) as failed:
        job.wait(timeout=LIMIT_S)
    error = failed.value.error
    assert error["code"] == "out_of_memory"
    assert error["memory"]["where"] == "device"
    assert error["memory"]["limit_bytes"] < 0.01 * torch.cuda.mem_get_info()[1]
