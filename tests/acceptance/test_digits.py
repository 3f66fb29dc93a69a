"""The life of one job on the embedded service, from data to inference, and what it must equal."""

import json
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from safetensors.numpy import load
from sklearn.datasets import load_digits
from torch import nn

import glasshouse as gh
from tests.acceptance.services import LocalService, plain_environment, run_python
from tests.acceptance.specs import FIELDS, digits_example

KINDS = ["output", "output_grad", "param", "param_grad"]
WATCHED = ["conv1", "relu1", "pool1", "flat", "drop", "fc"]
METRICS = ("loss", "accuracy")
LINEAR = {"name": "fc", "type": "Linear", "args": {"out_features": 10}}
SEED, NUM_EPOCHS, BATCH_SIZE, NUM_THREADS = 7, 3, 100, 1


# --- the life of a job -----------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """A trained job, and the events that were streamed while it ran."""

    job: gh.client.Job
    events: list[Any]


@pytest.fixture(scope="module")
def watched(client: gh.Client, digits: str) -> Watched:
    spec = digits_example(digits, stop={"epochs": 8})
    spec["probes"].append(
        {"layers": ["conv1"], "kinds": KINDS, "every": 50, "want": ["stats", "full"]}
    )
    spec["probes"] = [probe | {"max_overhead": None} for probe in spec["probes"]]
    job = client.jobs.create(spec)
    events = list(job.stream())
    return Watched(job.wait(timeout=200), events)


def test_a_submitted_job_is_watched_from_its_first_state_to_its_end(watched: Watched):
    states = [event.to for event in watched.events if event.type == "state"]
    assert states == ["queued", "starting", "running", "succeeded"]
    losses = [event for event in watched.events if event.type == "metrics" and event.step == 0]
    assert 1.5 < losses[0].values["loss"] < 4
    assert watched.events[-1].type == "end"
    progress = watched.job.progress
    assert (progress["step"], progress["samples"]) == (8 * 41, 8 * 1297)
    assert progress["step"] == progress["num_steps"]


def test_it_learns_to_read_digits(watched: Watched):
    assert watched.job.metrics()["validation/accuracy"]["last"] > 0.95
    loss = watched.job.metrics("loss")
    assert loss.steps.tolist() == list(range(8 * 41))
    assert loss.values[:20].mean() > 4 * loss.values[-20:].mean()


def test_each_validation_source_has_its_series(client: gh.Client, digits: str):
    """A stored split and an uploaded one; the accuracies are those of inferences."""
    pixels, labels = load_digits(return_X_y=True)
    noise = np.random.default_rng(0).uniform(0, 1, (200, 1, 8, 8))
    images = np.float32(0.4 * pixels[-200:].reshape(-1, 1, 8, 8) / 16 + 0.6 * noise)
    job = client.train(
        [{"name": "flat", "type": "Flatten"}, LINEAR],
        digits,
        validation={"clean": "test", "noisy": {"image": images, "label": labels[-200:]}},
        epochs=3,
        devices={"type": "cpu", "threads": 1},
        seed=1,
    ).wait(timeout=200)
    named = {f"validation/{source}/{name}" for source in ("clean", "noisy") for name in METRICS}
    last = {name: one["last"] for name, one in job.metrics().items() if "validation" in name}
    assert {*last} == named
    inferred = {
        "clean": client.infer(job, data={"dataset": digits, "split": "test"}, fields=["id"])["fc"],
        "noisy": client.infer(job, {"image": images}, fields=["id"])["fc"],
    }
    rows = client.datasets.rows(digits, "test", limit=250)
    truth = {"clean": [row["label"] for row in rows], "noisy": labels[-200:]}
    for source, classes in inferred.items():
        accuracy = last[f"validation/{source}/accuracy"]
        assert accuracy == pytest.approx((classes == truth[source]).mean())
    assert last["validation/clean/accuracy"] > last["validation/noisy/accuracy"] + 0.05
    ways = {name: way for name, way in job.refresh().data["directions"].items() if name in named}
    assert ways == {name: "min" if name.endswith("loss") else "max" for name in named}
    best = [one for one in job.checkpoints() if one.best]
    assert [one.reason for one in best] == ["lowest validation/clean/loss"]
    assert job.best_checkpoint("validation/clean/loss").id == best[0].id


def test_every_probe_has_its_statistics_on_the_steps_it_asked_for(watched: Watched):
    for layer in ("conv1", "conv2", "hidden", "fc"):
        for kind in ("output", "output_grad"):
            stats = watched.job.layers[layer].stats(kind)
            due = {*range(0, 8 * 41, 10)} | ({*range(0, 8 * 41, 50)} if layer == "conv1" else set())
            assert stats.steps.tolist() == sorted(due)
            assert (stats["std"] > 0).all()
            assert not stats["nan"].any()


def test_captured_tensors_have_the_shapes_of_the_network(watched: Watched):
    conv1 = watched.job.layers["conv1"]
    assert conv1.output(step=100).shape == (32, 16, 8, 8)
    assert conv1.output_grad(step=100).shape == (32, 16, 8, 8)
    assert conv1.param("weight", step=100).shape == (16, 1, 3, 3)
    assert conv1.param_grad("bias", step=100).shape == (16,)
    stats = conv1.stats("output")
    place = stats.steps.tolist().index(100)
    values = conv1.output(step=100).astype(np.float64)
    assert stats["mean"][place] == pytest.approx(values.mean(), rel=1e-4, abs=1e-6)
    assert stats["absmax"][place] == pytest.approx(np.abs(values).max(), rel=1e-6)


def infer(client: gh.Client, watched: Watched, digits: str, **options: Any) -> dict[str, Any]:
    rows = {"dataset": digits, "split": "test"}
    spec = {"kind": "infer", "job": watched.job.id, "data": rows, **options}
    return client.jobs.create(spec).wait(timeout=200).outputs()


def test_inference_gives_several_layers_and_fields(client: gh.Client, watched, digits: str):
    options = {"outputs": ["conv1", "fc"], "fields": ["value", "id", "prob"]}
    found = infer(client, watched, digits, **options)
    assert {name: array.shape for name, array in found.items()} == {
        "conv1/value": (250, 16, 8, 8),
        "conv1/id": (250, 16, 8),
        "conv1/prob": (250, 16, 8),
        "fc/value": (250, 10),
        "fc/id": (250,),
        "fc/prob": (250,),
    }
    scores = found["fc/value"]
    assert (found["fc/id"] == scores.argmax(axis=1)).all()
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    best = (shares / shares.sum(axis=1, keepdims=True)).max(axis=1)
    assert np.allclose(found["fc/prob"], best, atol=1e-6)
    (few,) = client.datasets.rows(digits, "test", limit=1, values=3)
    assert (few["image"]["truncated"], len(few["image"]["values"])) == (True, 3)
    labels = [row["label"] for row in client.datasets.rows(digits, "test", limit=250)]
    assert (found["fc/id"] == labels).mean() > 0.95


def test_results_are_joined_below_or_beside_each_other(client: gh.Client, watched, digits: str):
    apart = infer(client, watched, digits, outputs=["relu3", "fc"])
    beside = infer(client, watched, digits, outputs=["relu3", "fc"], flatten={"axis": 1})
    assert (beside["value"] == np.hstack([apart["relu3/value"], apart["fc/value"]])).all()
    below = infer(client, watched, digits, outputs=["hidden", "relu3"], flatten={"axis": 0})
    assert below["value"].shape == (500, 64)
    assert (below["value"][250:] == apart["relu3/value"]).all()


def test_a_short_inference_is_one_request(http: httpx2.Client, watched: Watched):
    rows = [np.arange(64).reshape(1, 8, 8).tolist(), np.zeros((1, 8, 8)).tolist()]
    spec = {"kind": "infer", "job": watched.job.id, "inputs": {"image": rows}, "outputs": ["fc"]}
    spec |= {"fields": ["value"]}
    headers = {"Prefer": "wait=60", "Idempotency-Key": f"short-{watched.job.id}"}
    answer = http.post("/jobs", json=spec, headers=headers)
    assert (answer.status_code, answer.headers["preference-applied"]) == (201, "wait=60")
    job = answer.json()
    assert job["state"] == "succeeded"
    assert np.shape(job["result"]["fc"]["value"]["data"]) == (2, 10)
    assert answer.headers["location"].endswith(f"/jobs/{job['id']}")
    assert http.get(f"/jobs/{job['id']}").json() == job
    again = http.post("/jobs", json=spec, headers=headers)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == job


def test_a_submission_waits_no_longer_than_it_says(http: httpx2.Client, digits: str):
    spec = {**digits_example(digits), "stop": {"epochs": 10_000}}
    answer = http.post("/jobs", json=spec, headers={"Prefer": "wait=1"})
    job = answer.json()
    assert (answer.status_code, answer.headers["preference-applied"]) == (201, "wait=1")
    assert job["state"] in ("queued", "starting", "running")
    assert "result" not in job
    assert http.post(f"/jobs/{job['id']}/cancel").status_code == 202
    count = len(http.get("/jobs?limit=100").json()["data"])
    refused = http.post("/jobs", json=spec, headers={"Prefer": "wait=soon"})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_header")
    assert len(http.get("/jobs?limit=100").json()["data"]) == count


def test_the_weights_of_a_checkpoint_are_downloaded_in_parts(http: httpx2.Client, watched: Watched):
    checkpoint = watched.job.checkpoints()[-1]
    assert checkpoint.data["step"] == 8 * 41
    path = f"/checkpoints/{checkpoint.id}/weights"
    whole = http.get(path)
    half = len(whole.content) // 2
    first = http.get(path, headers={"Range": f"bytes=0-{half - 1}"})
    second = http.get(path, headers={"Range": f"bytes={half}-"})
    assert (first.status_code, second.status_code) == (206, 206)
    assert first.content + second.content == whole.content
    assert load(whole.content)["fc.weight"].shape == (10, 64)


def test_the_command_line_reports_the_same(local_service: LocalService, watched: Watched):
    shown = json.loads(local_service.command("metrics", watched.job.id, "loss", "--json"))
    assert shown["values"][-1] == watched.job.metrics("loss").values[-1]
    assert "validation/accuracy" in local_service.command("metrics", watched.job.id)


# --- exactness -------------------------------------------------------------------------------


def exact_spec(dataset: str, probes: list[dict[str, Any]]) -> dict[str, Any]:
    """A network with dropout and a last batch that is smaller, trained with momentum."""
    return {
        "kind": "train",
        "seed": SEED,
        "network": {
            "layers": [
                {"name": "conv1", "type": "Conv2d", "args": {"out_channels": 8, "kernel_size": 3}},
                {"name": "relu1", "type": "ReLU", "args": {"inplace": True}},
                {"name": "pool1", "type": "MaxPool2d", "args": {"kernel_size": 2}},
                {"name": "flat", "type": "Flatten"},
                {"name": "drop", "type": "Dropout", "args": {"p": 0.2}},
                {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
            ]
        },
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.05, "momentum": 0.9}},
        "data": {
            "train": {"dataset": dataset, "split": "train"},
            "fields": FIELDS,
            "batch_size": BATCH_SIZE,
        },
        "stop": {"epochs": NUM_EPOCHS},
        "devices": {"type": "cpu", "threads": NUM_THREADS},
        "probes": probes,
    }


@dataclass
class ByHand:
    """What a torch loop that knows nothing of this project computes."""

    losses: list[float] = field(default_factory=list)
    tensors: dict[tuple[int, str, str], torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train_by_hand() -> ByHand:
    """The same training, written out."""
    found = ByHand()
    digits = load_digits()
    rows = np.random.RandomState(0).permutation(1797)[:1297]
    images = torch.tensor(digits.images[rows] / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target[rows], dtype=torch.int64)
    torch.manual_seed(SEED)
    conv1, fc = nn.Conv2d(1, 8, 3), nn.Linear(72, 10)
    relu1, pool1, flat, drop = nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2)
    network = nn.ModuleDict({"conv1": conv1, "fc": fc})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    step = 0
    for epoch in range(NUM_EPOCHS):
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
        for batch in torch.randperm(1297, generator=generator).split(BATCH_SIZE):
            mapped = conv1(images[batch])
            kept = mapped.detach().clone()
            mapped.register_hook(lambda grad, step=step: keep(found, step, "output_grad", grad))
            scores = fc(drop(flat(pool1(relu1(mapped)))))
            loss = loss_fn(scores, labels[batch])
            loss.backward()
            found.losses.append(loss.item())
            found.tensors[step, "conv1", "output"] = kept
            found.tensors[step, "fc", "output"] = scores.detach().clone()
            for name, parameter in network.named_parameters():
                found.tensors[step, name, "param"] = parameter.detach().clone()
                found.tensors[step, name, "param_grad"] = parameter.grad.clone()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
    found.weights = network.state_dict()
    return found


def keep(found: ByHand, step: int, kind: str, tensor: torch.Tensor) -> None:
    found.tensors[step, "conv1", kind] = tensor.clone()


@pytest.fixture(scope="module")
def by_hand() -> Generator[ByHand]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield train_by_hand()
    torch.set_num_threads(before)


EVERYTHING = [{"layers": ["*"], "kinds": KINDS, "every": 1, "want": ["stats", "full"]}]
EVERYTHING[0]["max_overhead"] = None


@pytest.fixture(scope="module", params=[[], EVERYTHING], ids=["unwatched", "all watched"])
def exact(request: pytest.FixtureRequest, client: gh.Client, digits: str) -> gh.client.Job:
    job = client.jobs.create(exact_spec(digits, request.param))
    return job.wait(timeout=200)


def test_losses_equal_a_loop_written_by_hand(exact: gh.client.Job, by_hand: ByHand):
    assert exact.metrics("loss").values.tolist() == by_hand.losses
    assert len(by_hand.losses) == 39


def test_weights_equal_a_loop_written_by_hand(exact: gh.client.Job, by_hand: ByHand, http):
    checkpoint = exact.checkpoints()[-1].id
    weights = load(http.get(f"/checkpoints/{checkpoint}/weights").content)
    assert weights.keys() == by_hand.weights.keys()
    for name, wanted in by_hand.weights.items():
        assert (weights[name] == wanted.numpy()).all(), name


def test_captured_tensors_equal_autograds(exact: gh.client.Job, by_hand: ByHand):
    if not exact.spec()["probes"]:
        assert list(exact.layers["conv1"].all_stats()) == []
        return
    for step in (0, 12, 38):
        for (at, name, kind), wanted in by_hand.tensors.items():
            if at == step:
                captured = exact.layers[name].tensor(kind, step=step)
                assert captured.step == step
                assert (captured.values == wanted.numpy()).all(), (step, name, kind)


def test_everything_that_was_asked_for_was_seen(exact: gh.client.Job, http: httpx2.Client):
    query = {"layer": "*", "max_points": 1000}
    series = http.get(f"/jobs/{exact.id}/stats", params=query).raise_for_status().json()["data"]
    seen = {(entry["layer"], entry["kind"]): len(entry["step"]) for entry in series}
    if not exact.spec()["probes"]:
        assert seen == {}
        return
    for kind in ("output", "output_grad"):
        assert {(name, kind) for name in WATCHED} <= seen.keys()
    for kind in ("param", "param_grad"):
        assert {(f"{name}.weight", kind) for name in ("conv1", "fc")} <= seen.keys()
    assert set(seen.values()) == {39}
    assert "dropped" not in {event.type for event in exact.events()}


@pytest.mark.parametrize("probes", [[], EVERYTHING], ids=["unwatched", "all watched"])
def test_the_engine_alone_gives_the_same_bits(
    probes: list[dict[str, Any]], by_hand: ByHand, tmp_path: Path
):
    (tmp_path / "job.json").write_text(json.dumps(exact_spec("digits", probes)))
    arguments = [str(tmp_path / "job.json"), "--out", str(tmp_path / "out")]
    run_python("-m", "engine", *arguments, environment=plain_environment())
    assert spooled_losses(tmp_path / "out" / "spool") == by_hand.losses
    [model] = (tmp_path / "out" / "checkpoints").glob("step-39/model.safetensors")
    weights = load(model.read_bytes())
    for name, wanted in by_hand.weights.items():
        assert (weights[name] == wanted.numpy()).all(), name


def spooled_losses(spool: Path) -> list[float]:
    """The losses of a spool: frames of a length, a checksum, and JSON."""
    data, place, found = spool.read_bytes(), 0, []
    while place < len(data):
        length = int.from_bytes(data[place : place + 4], "little")
        record = json.loads(data[place + 8 : place + 8 + length])
        place += 8 + length
        if record["type"] == "metrics" and "loss" in record["values"]:
            found.append(record["values"]["loss"])
    return found
