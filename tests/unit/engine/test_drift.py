"""Drift of served rows: planted shifts, what is kept, and that predictions stay the same."""

import json
import math
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.inference.blocks import Column
from engine.process.planner import answer
from engine.serving import requests
from engine.serving.drift import watch as watching
from engine.serving.drift.series import Series, measures_of
from engine.serving.drift.watch import DriftWatch, VersionWatch
from engine.serving.served_models import ServedVersion, VersionName
from engine.training.report import Outputs
from glasshouse.events import parse_event
from glasshouse.spec import Drift, parse_trained
from tests.unit.engine import ragged
from tests.unit.engine.runs import of_type, planned, run, write_table
from tests.waiting import until

CPU = torch.device("cpu")
NUM_TRAINING = 3000
LAYERS = [
    {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 3}, "inputs": ["city"]},
    {"name": "both", "type": "cat", "args": {"dim": 1}, "inputs": ["x", "emb"]},
    {"name": "fc1", "type": "Linear", "args": {"out_features": 16}},
    {"name": "relu", "type": "ReLU", "args": {"inplace": True}},
    {"name": "fc2", "type": "Linear", "args": {"out_features": 2}},
]
TRAIN = {
    "kind": "train",
    "seed": 1,
    "network": {"layers": LAYERS},
    "loss": {"type": "CrossEntropyLoss", "inputs": ["fc2", "y"]},
    "optimizer": {"type": "Adam", "args": {"lr": 0.01}},
    "data": {
        "train": {"dataset": "ds_1", "split": "train"},
        "fields": {
            "x": {"type": "dense", "columns": ["rooms", "age", "price"]},
            "city": {"type": "integer", "classes": [10, 20, 30, 40]},
            "y": {"type": "integer", "dim": 2},
        },
        "normalize": {"x": {"type": "standard"}},
        "batch_size": 64,
    },
    "stop": {"epochs": 1},
}


class Rows:
    """Rows of one distribution: rooms are integers, most ages are zero."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def draw(self, num: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        x = np.stack(
            [
                self.rng.poisson(4, num),
                np.where(self.rng.random(num) < 0.6, 0, self.rng.gamma(2.0, 20.0, num)),
                self.rng.lognormal(10, 1, num),
            ],
            axis=1,
        ).astype(np.float32)
        return x, self.rng.choice([10, 20, 30, 40], num, p=[0.5, 0.3, 0.15, 0.05])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Path]:
    """The resolved spec, the checkpoint and the dataset."""
    folder = tmp_path_factory.mktemp("drift")
    x, city = Rows(0).draw(NUM_TRAINING)
    columns = dict(zip(("rooms", "age", "price"), x.T, strict=True))
    columns |= {"city": city, "y": (x[:, 1] > 0).astype(np.int64)}
    table = write_table(folder / "table", columns, {"train": slice(None)})
    meta = json.loads((table / "meta.json").read_text())
    resolved = planned(TRAIN, meta)["spec"]
    records = run(folder / "job", resolved, table)
    return resolved, folder / "job" / of_type(records, "checkpoint")[-1]["dir"], table


class Served:
    """A version whose requests are watched."""

    def __init__(
        self, trained: tuple[dict[str, Any], Path, Path], kept_at: Path | None = None, **drift: Any
    ) -> None:
        found = parse_trained(json.dumps(trained[0]))
        assert found is not None
        name = VersionName("houses", 3, "ckpt_1", trained[1], {"ds_1": trained[2]}, kept_at)
        self.version = ServedVersion(name, found, CPU, 64)
        self.records: list[dict[str, Any]] = []
        wanted = Drift(**{"window": 300, "reference_rows": 2000, "max_overhead": 1.0} | drift)
        self.drift = DriftWatch(wanted, Outputs(trained[1], self.records.append), CPU)

    def change(self, **facts: Any) -> None:
        """Change where the version says that its files are."""
        self.version.name = replace(self.version.name, **facts)

    def start(self) -> "Served":
        self.drift.use([self.version])
        self.drift.start()
        until(lambda: self.watch.reference or self.watch.problem, what="the reference")
        return self

    @property
    def watch(self) -> VersionWatch:
        return next(iter(self.drift._versions.values()))  # pyright: ignore[reportPrivateUsage]

    @property
    def findings(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["type"] == "finding"]

    def send(self, inputs: dict[str, Any], outputs: list[str] | None = None) -> dict[str, Column]:
        """Answer one request, and check that it is not changed by watching."""
        wanted = {} if outputs is None else {"outputs": outputs}
        body = json.dumps({"inputs": inputs, **wanted}).encode()
        asked = requests.read({"content_type": "application/json"}, body, self.version.inputs)
        with torch.inference_mode():
            sample = self.drift.begin(self.version, asked.outputs)
            (found,) = self.version.compute([asked], sample)
            (plain,) = self.version.compute([asked])
            self.drift.end(self.version, [asked], sample, 1.0)
        assert found.keys() == plain.keys()
        for name, column in found.items():
            assert column.values.numpy().tobytes() == plain[name].values.numpy().tobytes()
        return found

    def send_rows(
        self, rows: Rows, num: int, change: Callable[[Any, Any], None] | None = None, by: int = 7
    ) -> None:
        for first in range(0, num, by):
            x, city = rows.draw(min(by, num - first))
            if change is not None:
                change(x, city)
            self.send({"x": x.tolist(), "city": city.tolist()})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[..., Served]]:
    monkeypatch.setattr(watching, "_START_S", 0.0)
    made: list[Served] = []

    def serve(*args: Any, **more: Any) -> Served:
        made.append(Served(*args, **more))
        return made[-1]

    yield serve
    for one in made:
        one.drift.close()


def test_rows_like_those_of_training_raise_no_alarm(trained: Any, serve: Any):
    served = serve(trained, min_psi=0.0).start()
    served.send_rows(Rows(1), 3000)
    assert served.findings == []
    (entry,) = served.records[-1]["versions"]
    facts = {key: entry[key] for key in ("model", "version", "state", "detail")}
    assert facts == {"model": "houses", "version": 3, "state": "watching", "detail": None}
    assert 300 <= entry["rows"] < 307
    assert entry["at"] is not None
    series = [(one["of"], one["name"], one["measure"]) for one in entry["series"]]
    assert series == [
        ("field", "x", "rooms"),
        ("field", "x", "age"),
        ("field", "x", "price"),
        ("field", "city", "category"),
        ("layer", "emb", "mean"),
        ("layer", "emb", "rms"),
        ("layer", "fc1", "mean"),
        ("layer", "fc1", "rms"),
        ("layer", "fc2", "mean"),
        ("layer", "fc2", "rms"),
        ("layer", "fc2", "class"),
    ]
    assert all(0 < one["threshold"] < 0.2 for one in entry["series"])


def dearer(x: Any, _city: Any) -> None:
    x[:, 2] *= 5


def of_age_one(x: Any, _city: Any) -> None:
    x[:, 1] = np.where(x[:, 1] == 0, 1, x[:, 1])


def elsewhere(_x: Any, city: Any) -> None:
    city[:] = np.where(city == 10, 40, city)


@pytest.mark.parametrize(
    ("change", "name", "measure", "says"),
    [
        (dearer, "x", "price", "'price' of field 'x' moved from 3"),
        (of_age_one, "x", "age", "'age' of field 'x'"),
        (elsewhere, "city", "category", "field 'city' is '10' in 2.9% of the rows"),
    ],
)
def test_a_planted_shift_is_found_in_its_field_alone(
    trained: Any, serve: Any, change: Any, name: str, measure: str, says: str
):
    served = serve(trained).start()
    served.send_rows(Rows(1), 320)
    assert served.findings == []
    served.send_rows(Rows(2), 640, change)
    fields = [one for one in served.findings if one["series"]["of"] == "field"]
    assert [one["series"] for one in fields] == [{"of": "field", "name": name, "measure": measure}]
    (found,) = fields
    assert says in found["message"]
    assert found["message"].startswith("Requests to houses:3 differ from its training rows: ")
    assert found["psi"] > found["threshold"] == 0.2
    assert found["causes"]
    assert found["remedies"]
    parse_event({"job": "job_1", "seq": 1, "attempt": 1, **found})
    entry = served.watch.as_dict()["series"]
    drifted = {(one["name"], one["measure"]) for one in entry if one["drifted"]}
    assert (name, measure) in drifted
    other = {"x": "city", "city": "x"}[name]
    assert other not in {one for one, _ in drifted}
    assert ("emb" in {one for one, _ in drifted}) == (name == "city")  # it reads only the city


def test_a_series_is_reported_again_after_it_was_normal(trained: Any, serve: Any):
    served = serve(trained, layers=("emb",)).start()
    rows = Rows(3)
    for change, num in ((dearer, 1), (dearer, 1), (None, 1), (dearer, 2)):
        served.send_rows(rows, 300, change, by=100)
        assert len(served.findings) == num


def test_missing_values_are_found(tmp_path: Path, serve: Any):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 2)).astype(np.float32)
    table = write_table(
        tmp_path / "t", {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}, {"train": slice(None)}
    )
    spec = json.loads(json.dumps(TRAIN))
    spec["network"]["layers"] = [
        {"name": "filled", "type": "ReLU", "inputs": ["x"]},
        {"name": "fc2", "type": "Linear", "args": {"out_features": 2}},
    ]
    spec["data"]["fields"] = {
        "x": {"type": "dense", "fill": "NaN"},
        "y": {"type": "integer", "dim": 2},
    }
    del spec["data"]["normalize"]
    resolved = planned(spec, json.loads((table / "meta.json").read_text()))["spec"]
    records = run(tmp_path / "job", resolved, table)
    saved = tmp_path / "job" / of_type(records, "checkpoint")[-1]["dir"]
    served = serve((resolved, saved, table), window=100).start()
    given = [[None if n % 3 else 0.1 * n - 5, float(v)] for n, v in enumerate(x[:100, 1])]
    served.send({"x": [["NaN" if v is None else v for v in row] for row in given]})
    (found,) = [one for one in served.findings if one["series"]["of"] == "field"]
    assert found["series"]["measure"] == "[0]"
    assert "'[0]' of field 'x' is missing (NaN) in 66.0% of the rows" in found["message"]


def test_the_reference_is_that_of_all_training_rows_by_hand(trained: Any, serve: Any):
    served = serve(trained, reference_rows=NUM_TRAINING).start()
    reference = served.watch.reference
    assert reference is not None
    assert reference.num_rows == NUM_TRAINING
    x, city = Rows(0).draw(NUM_TRAINING)
    for place, column in enumerate(("rooms", "age", "price")):
        found = reference.series[Series("field", "x", column)]
        assert found.mean == pytest.approx(x[:, place].mean(), rel=1e-4)
        values = x[:, place].astype(np.float64)
        assert found.counts.tolist() == found.bins.counts(values).tolist()
    counts = reference.series[Series("field", "city", "category")].counts
    assert counts.tolist() == [*np.bincount(city // 10)[1:].tolist(), 0]
    weights = served.version.network.layers["emb"].weight.detach().numpy().astype(np.float64)
    found = reference.series[Series("layer", "emb", "rms")]
    assert found.mean == pytest.approx(
        np.sqrt((weights[city // 10 - 1] ** 2).mean(1)).mean(), rel=1e-5
    )


def test_measures_of_steps_leave_out_padding():
    x = torch.tensor([[[1.0, 2.0], [9.0, 9.0]], [[3.0, 4.0], [5.0, 6.0]]])
    found = measures_of(x, torch.tensor([1, 2]))
    assert found["mean"].tolist() == [1.5, 4.5]
    assert found["rms"].tolist() == pytest.approx([math.sqrt(2.5), math.sqrt(86 / 4)])
    assert measures_of(torch.tensor([[2.0], [3.0]]), None)["value"].tolist() == [2.0, 3.0]
    scores = measures_of(torch.tensor([[0.0, 1.0], [3.0, -1.0]]), None, is_scores=True)
    assert scores["class"].tolist() == [1, 0]
    whole = measures_of(torch.arange(12.0).reshape(2, 3, 2), None)
    assert whole["mean"].tolist() == [2.5, 8.5]


def test_only_layers_that_a_request_computes_are_watched(trained: Any, serve: Any):
    served = serve(trained).start()
    x, city = Rows(4).draw(64)
    for _ in range(5):
        served.send({"city": city.tolist()}, ["emb"])
    counted = {(one["of"], one["name"]) for one in served.watch.as_dict()["series"]}
    assert counted == {("field", "city"), ("layer", "emb")}
    assert served.watch.layers_of(("fc1",)) == ("emb", "fc1")
    for _ in range(5):
        served.send({"x": x.tolist(), "city": city.tolist()}, ["relu", "fc2"])
    assert len(served.watch.as_dict()["series"]) == 11


def test_a_kept_reference_is_used_and_any_other_file_is_not(
    trained: Any, serve: Any, tmp_path: Path
):
    kept = tmp_path / "kept"
    first = serve(trained, kept).start().watch.reference
    (path,) = kept.iterdir()
    gone = serve(trained, kept)
    gone.change(datasets={"ds_1": None})  # its rows are not needed any more
    again = gone.start().watch.reference
    assert again.as_dict() == first.as_dict()
    whole = path.read_bytes()
    document = json.loads(whole)
    foreign = [
        whole[: len(whole) // 2],
        b"",
        b"[1]",
        b"\x80\x04N.",
        json.dumps({**document, "question": {}}).encode(),
        json.dumps({**document, "series": [{**document["series"][0], "counts": [1]}]}).encode(),
    ]
    for content in foreign:
        path.write_bytes(content)
        made = serve(trained, kept).start().watch.reference
        assert made.as_dict() == first.as_dict()
        assert path.read_bytes() == whole
    assert [one.name for one in kept.iterdir()] == [path.name]  # nothing half written
    serve(trained, kept, reference_rows=500).start()
    assert len([*kept.iterdir()]) == 2


def test_a_directory_that_cannot_be_written_only_costs_the_file(
    trained: Any, serve: Any, tmp_path: Path
):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    assert serve(trained, blocked / "drift").start().watch.reference is not None


def test_why_there_is_no_reference_is_said(trained: Any, serve: Any, tmp_path: Path):
    deleted = serve(trained)
    deleted.change(datasets={"ds_1": None})
    damaged = serve(trained)
    damaged.change(datasets={"ds_1": tmp_path})
    for served, says in (
        (deleted, "Its training rows are gone: the dataset ds_1 was deleted."),
        (damaged, "Its training rows cannot be read: "),
    ):
        served.start().drift.settle()
        (entry,) = served.records[-1]["versions"]
        assert entry["state"] == "unavailable"
        assert entry["detail"].startswith(says)
        served.send_rows(Rows(1), 70)
        assert served.watch.as_dict()["rows"] == 0


def test_few_training_rows_are_no_reference(tmp_path: Path, serve: Any):
    table = ragged.texts(tmp_path / "few")
    resolved = planned(ragged.job(), ragged.meta_of(table))["spec"]
    records = run(tmp_path / "job", resolved, table)
    saved = tmp_path / "job" / of_type(records, "checkpoint")[-1]["dir"]
    served = serve((resolved, saved, table)).start()
    assert served.watch.problem == (
        "It was trained on 12 rows, and at least 100 are needed for a comparison."
    )


def test_sequences_are_compared_by_length_and_a_step(tmp_path: Path, serve: Any):
    rng = np.random.default_rng(5)

    def lists(num: int, longest: int) -> list[list[int]]:
        return [rng.integers(0, 10, rng.integers(1, longest)).tolist() for _ in range(num)]

    table = ragged.texts(tmp_path / "lists", lists(400, 9))
    resolved = planned(ragged.job(), ragged.meta_of(table))["spec"]
    records = run(tmp_path / "job", resolved, table)
    saved = tmp_path / "job" / of_type(records, "checkpoint")[-1]["dir"]
    served = serve((resolved, saved, table), window=200).start()

    def drifted() -> set[tuple[str, str]]:
        entry = served.watch.as_dict()["series"]
        return {(one["name"], one["measure"]) for one in entry if one["drifted"]}

    for _ in range(40):
        served.send({"ids": lists(5, 9)})
    assert served.watch.num_rows == 200
    assert drifted() == set()
    assert {("ids", "length"), ("ids", "step"), ("emb", "mean"), ("fc", "class")} <= {
        (one["name"], one["measure"]) for one in served.watch.as_dict()["series"]
    }
    for _ in range(40):
        served.send({"ids": lists(5, 30)})
    assert ("ids", "length") in drifted()
    assert ("ids", "step") not in drifted()
    for _ in range(40):
        # the first step is as before: it is not always that one that is compared
        served.send({"ids": [[row[0], *(i % 2 for i in row[1:])] for row in lists(5, 9)]})
    assert ("ids", "step") in drifted()
    assert ("ids", "length") not in drifted()


def test_watching_keeps_its_budget(trained: Any, serve: Any):
    served = serve(trained, max_overhead=0.02).start()
    x, city = Rows(6).draw(64)
    body = json.dumps({"inputs": {"x": x.tolist(), "city": city.tolist()}}).encode()
    asked = requests.read({"content_type": "application/json"}, body, served.version.inputs)
    budget = served.drift.budget = watching.Budget(0.02)
    began, watched, longest_s = time.perf_counter(), 0, 0.0
    with torch.inference_mode():
        for _ in range(3000):
            sample = served.drift.begin(served.version, asked.outputs)
            served.version.compute([asked], sample)
            before_s = budget.counting_s
            served.drift.end(served.version, [asked], sample, 2e-4)
            longest_s = max(longest_s, budget.counting_s - before_s)
            watched += sample is not None
    assert 0 < watched < 3000
    # what is over is paid back by later batches: at most one block of rows
    assert budget.counting_s <= 0.01 * (time.perf_counter() - began) + longest_s
    assert budget.computed_s == pytest.approx(3000 * 2e-4 - budget.delay_s)


def test_half_of_the_budget_is_for_delays_and_half_for_counting():
    at = 100.0
    budget = watching.Budget(0.1, lambda: at)
    assert budget.has_credit
    budget.computed(1.0, delay_s=0.06)  # 0.05 were allowed
    assert not budget.has_credit
    at += 100.0  # waiting is no reason to delay answers
    assert not budget.has_credit
    budget.computed(0.3)
    assert budget.has_credit
    budget.counted(0.15)  # 0.05 were saved, and no more can be
    assert not budget.has_credit
    budget.computed(10.0)
    at += 1.9
    assert not budget.has_credit
    at += 0.2
    assert budget.has_credit
    assert (budget.computed_s, budget.delay_s, budget.counting_s) == pytest.approx(
        (11.3, 0.06, 0.15)
    )


def test_a_failure_of_watching_ends_no_service(
    trained: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
):
    served = serve(trained).start()

    def fail(_self: Any, _rows: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(watching.FieldSeries, "values", fail)
    served.send_rows(Rows(1), 400)
    entry = served.watch.as_dict()
    assert entry["state"] == "unavailable"
    assert entry["detail"] == "Watching failed: RuntimeError: planted"


def test_a_version_that_is_no_longer_served_is_not_reported(trained: Any, serve: Any):
    served = serve(trained).start()
    served.drift.use([])
    served.drift.settle()
    assert served.records[-1]["versions"] == []
    served.send_rows(Rows(1), 70)


def test_layers_that_no_network_has_are_refused_before_the_job_is_stored(trained: Any):
    spec = {"kind": "serve", "models": ["m"], "drift": {"layers": ["fc*", "fcc1"]}}
    asked = {"id": 1, "do": "plan", "spec": spec, "datasets": {}, "models": {"m": trained[0]}}
    reply = answer(asked)
    (problem,) = reply["errors"]
    assert (problem["pointer"], problem["code"]) == ("/drift/layers/1", "unknown_layer")
    assert "no layer matches 'fcc1'; did you mean fc1" in problem["detail"]
    assert "the networks have: emb, both, fc1, relu, fc2" in problem["detail"]
    assert answer(asked | {"spec": {**spec, "drift": {"layers": ["fc*"]}}})["ok"]
    assert answer(asked | {"spec": {**spec, "drift": None}})["ok"]
