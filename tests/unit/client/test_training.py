"""The specs that `Client.train` and `Client.infer` build from their few arguments."""

import hashlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import glasshouse as gh
from glasshouse import jsonio
from glasshouse.client.data.files import size_text
from glasshouse.client.training.specs import window_fields
from glasshouse.spec import Graph, Preset, Source, TrainJob, parse_job
from tests.stub_api import answer, job, listing, problem

Connect = Callable[..., gh.Client]
LAYERS = [
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 3}},
]
RNG = np.random.default_rng(0)


class Recorder:
    """Takes uploads and jobs, and answers as if all were well."""

    def __init__(self, **outputs: np.ndarray) -> None:
        self.specs: list[Any] = []
        self.uploads: list[dict[str, np.ndarray]] = []
        self.deleted: list[str] = []
        self.digests: list[str] = []
        self.outputs = outputs
        self.dataset: dict[str, Any] = {"id": "ds_1", "state": "ready", "columns": []}
        self.trained: dict[str, Any] = {}

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/api/v1/datasets", self.upload, methods=["POST"]),
            Route("/api/v1/datasets", self.known, methods=["GET"]),
            Route("/api/v1/datasets/{id}", self.one_dataset, methods=["GET", "DELETE"]),
            Route("/api/v1/datasets/{id}/stats", self.stats),
            Route("/api/v1/jobs", self.create, methods=["POST"]),
            Route("/api/v1/jobs/{id}", self.one_job),
            Route("/api/v1/jobs/{id}/spec", self.spec),
            Route("/api/v1/jobs/{id}/artifacts/{name}", self.artifact),
            Route("/api/v1/checkpoints/{id}", self.checkpoint),
        ]

    async def upload(self, request: Request) -> Response:
        assert request.query_params["format"] == "npz"
        body = await request.body()
        self.digests.append(hashlib.sha256(body).hexdigest())
        arrays = dict(np.load(io.BytesIO(body)))
        self.uploads.append(arrays)
        splits = {name.rsplit("_", 1)[1]: len(array) for name, array in arrays.items()}
        self.dataset = {**self.dataset, "splits": splits}
        return answer({**self.dataset, "state": "pending"}, 201)

    async def known(self, request: Request) -> Response:
        """Those that were uploaded with this content."""
        same = self.digests.count(request.query_params["sha256"])
        return listing(*[{**self.dataset, "format": "npz"}] * same)

    async def one_dataset(self, request: Request) -> Response:
        if request.method == "DELETE":
            self.deleted.append(request.path_params["id"])
            return Response(status_code=204)
        return answer(self.dataset)

    async def stats(self, request: Request) -> Response:
        return answer({"splits": {"train": {"label": {"max": 8}}, "test": {"label": {"max": 9}}}})

    async def create(self, request: Request) -> Response:
        self.specs.append(jsonio.loads(await request.body()))
        return answer(job(), 201)

    async def one_job(self, request: Request) -> Response:
        return answer(job(id=request.path_params["id"], state="succeeded"))

    async def spec(self, request: Request) -> Response:
        return answer(self.trained)

    async def artifact(self, request: Request) -> Response:
        return Response(save(self.outputs))

    async def checkpoint(self, request: Request) -> Response:
        return answer({"id": request.path_params["id"], "job": "job_0"})


def checked(spec: Any) -> TrainJob:
    """The spec as the service would read it: it must be valid."""
    found = parse_job(jsonio.dumps(spec))
    assert isinstance(found, TrainJob)
    return found


def test_a_pair_of_arrays_becomes_a_dataset_with_fields(connect: Connect):
    service = Recorder()
    x = RNG.normal(size=(6, 1, 2, 2))
    y = np.array([0, 1, 2, 0, 1, 2])
    client = connect(*service.routes)
    client.train(LAYERS, (x, y), validation=(x[:2], y[:2]), epochs=2, seed=3, name="pair")
    assert service.uploads[0]["x_train"].dtype == np.float32
    assert sorted(service.uploads[0]) == ["x_train", "x_validation", "y_train", "y_validation"]
    spec = checked(service.specs[0])
    assert service.specs[0] == {
        "kind": "train",
        "network": {"type": "graph", "layers": LAYERS},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "y"]},
        "optimizer": {"type": "Adam"},
        "data": {
            "train": {"dataset": "ds_1", "split": "train"},
            "validation": {"dataset": "ds_1", "split": "validation"},
            "fields": {
                "x": {"type": "dense", "shape": [1, 2, 2]},
                "y": {"type": "integer", "dim": 3},
            },
            "batch_size": 32,
        },
        "stop": {"epochs": 2},
        "metrics": [{"type": "accuracy", "inputs": ["fc", "y"]}],
        "name": "pair",
        "seed": 3,
    }
    assert spec.data.validation is not None


def test_the_same_arrays_are_uploaded_once(connect: Connect):
    service = Recorder()
    client = connect(*service.routes)
    x, y = RNG.normal(size=(6, 4)), np.array([0, 1, 2, 0, 1, 2])
    for _ in range(2):
        client.train(LAYERS, (x, y), epochs=1)
    assert len(service.uploads) == 1
    client.train(LAYERS, (x + 1, y), epochs=1)
    assert len(service.uploads) == 2
    assert len(service.specs) == 3


def test_a_preset_goes_through_by_its_name(connect: Connect):
    service = Recorder()
    client = connect(*service.routes)
    sized = {"type": "preset", "preset": "mlp", "args": {"hidden": [4]}}
    for network in ("mnist_cnn", sized, Preset.model_validate(sized)):
        client.train(network, (RNG.normal(size=(3, 1, 28, 28)), np.array([0, 1, 2])), epochs=1)
    sent = [spec["network"] for spec in service.specs]
    assert sent == [{"type": "preset", "preset": "mnist_cnn"}, sized, sized]
    outputs = [spec["loss"]["inputs"][0] for spec in service.specs]
    assert outputs == ["fc", "out", "out"]
    assert checked(service.specs[1]).network.layers[1].args == {"out_features": 4}


def test_plain_numbers_as_targets_are_a_regression(connect: Connect):
    service = Recorder()
    network = Graph.model_validate_json(jsonio.dumps({"layers": LAYERS}))
    data = {"train": {"x": RNG.normal(size=(4, 2)), "y": RNG.normal(size=4)}}
    probe = {"layers": ["fc"], "kinds": ["output"], "every": np.int64(5)}
    connect(*service.routes).train(
        network, data, steps=7, optimizer="SGD", batch_size=2, probes=[probe]
    )
    spec = checked(service.specs[0])
    assert spec.loss.type == "MSELoss"
    assert service.specs[0]["data"]["fields"]["y"] == {"type": "dense", "shape": [1]}
    assert spec.stop.steps == 7
    assert spec.metrics == ()
    assert spec.probes[0].every == 5


def test_the_accuracy_is_of_one_class_per_row(connect: Connect):
    """Targets that are sequences have none by default; it would be refused."""
    service = Recorder()
    client = connect(*service.routes)
    text = {"train": {"dataset": "ds_1"}}
    for kind, wanted in (("language_model", ()), ("cbow", (("fc", "centre"),))):
        windows = {"type": kind, "tokens": "words"} | ({"length": 8} if kind != "cbow" else {})
        target = "centre" if kind == "cbow" else "target"
        client.train(
            LAYERS,
            text,
            fields=window_fields(windows),
            windows=windows,
            loss={"type": "CrossEntropyLoss", "inputs": ["fc", target]},
            epochs=1,
        )
        found = checked(service.specs[-1]).metrics
        assert tuple(metric.inputs for metric in found) == wanted


def test_a_part_of_the_rows_may_be_held_back(connect: Connect):
    service = Recorder()
    data = {"x": np.zeros((10, 2), np.float32), "y": np.arange(10)}
    connect(*service.routes).train(LAYERS, data, epochs=1, validation=0.2)
    found = checked(service.specs[0]).data
    assert found.train.fraction == (0.0, 0.8)
    assert found.validation is not None
    assert found.validation.fraction == (0.8, 1.0)


def test_a_stored_dataset_is_used_by_its_id(connect: Connect):
    service = Recorder()
    service.dataset = {
        "id": "ds_7",
        "state": "ready",
        "columns": [
            {"name": "image", "dtype": "uint8", "shape": [28, 28]},
            {"name": "label", "dtype": "uint8", "shape": []},
            {"name": "file", "dtype": "string", "shape": []},
        ],
        "splits": {"train": 60, "test": 10},
    }
    connect(*service.routes).train(LAYERS, "ds_7", epochs=1, validation="test")
    spec = checked(service.specs[0])
    assert service.uploads == []
    assert service.specs[0]["data"]["fields"] == {
        "image": {"type": "dense", "shape": [28, 28]},
        "label": {"type": "integer", "dim": 10},
    }
    assert (spec.data.train.split, spec.data.validation.split) == ("train", "test")  # pyright: ignore


def test_validation_sources_with_names_are_stored_or_uploaded(connect: Connect):
    service = Recorder()
    x, y = np.zeros((6, 2), np.float32), np.array([0, 1, 2, 0, 1, 2])
    client = connect(*service.routes)
    named = {
        "half": {"dataset": "ds_9", "split": "test", "fraction": [0.0, 0.5]},
        "pair": (x[:3], np.array([0, 5, 1])),
        "columns": {"x": x[:2], "y": y[:2]},
        "source": Source(dataset="ds_8"),
        "stored": client.datasets.get("ds_7"),
    }
    client.train(LAYERS, (x, y), validation=named, epochs=1)
    data = service.specs[0]["data"]
    assert [*data["validation"]] == [*named]
    assert data["validation"]["half"] == named["half"]
    assert data["validation"]["pair"] == {"dataset": "ds_1", "split": "train"}
    assert data["validation"]["source"] == {"dataset": "ds_8"}
    assert data["validation"]["stored"] == {"dataset": "ds_1", "split": "train"}
    assert data["fields"]["y"]["dim"] == 6  # the largest class of all of them
    uploaded = [item["y_train"].tolist() for item in service.uploads]
    assert uploaded == [y.tolist(), [0, 5, 1], [0, 1]]
    assert [*checked(service.specs[0]).data.validations] == [f"validation/{name}" for name in named]
    client.train(LAYERS, (x, y), validation={"x": x[:2], "y": y[:2]}, epochs=1)
    assert service.specs[1]["data"]["validation"] == {"dataset": "ds_1", "split": "validation"}
    client.train(LAYERS, (x + 1, y), validation={"dataset": "ds_9"}, epochs=1)
    assert service.specs[2]["data"]["validation"] == {"dataset": "ds_9"}


def test_splits_of_a_stored_dataset_are_validation_sources(connect: Connect):
    service = Recorder()
    service.dataset = {
        "id": "ds_7",
        "state": "ready",
        "columns": [
            {"name": "image", "dtype": "uint8", "shape": [28, 28]},
            {"name": "label", "dtype": "uint8", "shape": []},
        ],
        "splits": {"train": 60, "validation": 5, "test": 10},
    }
    client = connect(*service.routes)
    named = {"clean": "validation", "noisy": "test"}
    client.train(LAYERS, "ds_7", validation=named, epochs=1)
    assert service.specs[0]["data"]["validation"] == {
        "clean": {"dataset": "ds_7", "split": "validation"},
        "noisy": {"dataset": "ds_7", "split": "test"},
    }
    with pytest.raises(ValueError, match="'clean' is the split 'validation' of one of several"):
        client.train(LAYERS, ["ds_7", "ds_7"], validation=named, epochs=1)


def test_validation_data_that_would_not_be_evaluated_is_refused(connect: Connect):
    service = Recorder()
    service.dataset = {
        "id": "ds_7",
        "state": "ready",
        "columns": [{"name": "x", "dtype": "float32", "shape": [2]}],
        "splits": {"train": 60},
    }
    client = connect(*service.routes)
    x, y = np.zeros((6, 2), np.float32), np.array([0, 1, 2, 0, 1, 2])
    held = {"train": {"dataset": "ds_7"}, "fields": {"x": {"type": "dense"}}}
    for data in ("ds_7", held):
        with pytest.raises(TypeError, match=r"sources by name: \{'held_out': \(x, y\)\}"):
            client.train(LAYERS, data, validation=(x, y), epochs=1)
    splits = {"train": (x, y), "validation": (x, y)}
    with pytest.raises(ValueError, match="data already has validation rows"):
        client.train(LAYERS, splits, validation={"clean": (x, y)}, epochs=1)


def test_several_stored_datasets_are_trained_on_as_one(connect: Connect):
    service = Recorder()
    service.dataset = {
        "id": "ds_7",
        "state": "ready",
        "columns": [
            {"name": "image", "dtype": "uint8", "shape": [28, 28]},
            {"name": "label", "dtype": "uint8", "shape": []},
        ],
        "splits": {"train": 60},
    }
    client = connect(*service.routes)
    pool = {"buffer_size": 200}
    both = ["ds_7", "ds_7"]
    client.train(LAYERS, both, epochs=1, shuffle=pool, interleave="sequential")
    spec = checked(service.specs[0])
    assert [source.split for source in spec.data.sources] == ["train", "train"]
    assert spec.data.interleave == "sequential"
    with pytest.raises(ValueError, match="cannot be a fraction of several datasets"):
        client.train(LAYERS, both, epochs=1, validation=0.2)


def test_how_rows_are_prepared_is_reported_in_a_word(connect: Connect):
    service = Recorder()
    service.dataset["splits"] = {"all": 10}
    windows = {"type": "cbow", "tokens": "words", "window": 3}
    network = [
        {"name": "bag", "type": "EmbeddingBag", "args": {"embedding_dim": 4, "mode": "sum"},
         "inputs": ["context"]},
        {"name": "fc", "type": "Linear", "args": {"out_features": 9}},
    ]  # fmt: skip
    connect(*service.routes).train(network, "ds_7", epochs=1, windows=windows)
    spec = checked(service.specs[0])
    assert service.specs[0]["data"]["windows"] == windows
    assert {name: field.type for name, field in spec.data.fields.items()} == {
        "context": "integer_sequence", "centre": "integer",
    }  # fmt: skip
    assert service.specs[0]["loss"]["inputs"] == ["fc", "centre"]
    rows = {"x": RNG.normal(size=(9, 4)), "y": RNG.normal(size=9)}
    prepared = {"normalize": {"x": "standard"}, "on_bad_row": "drop"}
    connect(*service.routes).train(LAYERS, rows, epochs=1, **prepared)
    spec = checked(service.specs[1])
    assert spec.data.normalize["x"].type == "standard"
    assert spec.data.on_bad_row == "drop"


def test_texts_are_inputs_as_they_are(connect: Connect):
    service = Recorder(fc=np.zeros((2, 3)))
    text = {"type": "integer_sequence", "tokens": "words"}
    service.trained = {"network": {"layers": LAYERS}, "data": {"fields": {"text": text}}}
    connect(*service.routes).infer("job_1", ["a fine film", [4, 17]])
    assert service.specs[0]["inputs"] == {"text": ["a fine film", [4, 17]]}


def test_a_description_of_the_data_goes_through_as_it_is(connect: Connect):
    service = Recorder()
    fields = {"x": {"type": "dense", "shape": [4]}, "y": {"type": "integer", "dim": 3}}
    data = {"train": {"dataset": "ds_3", "split": "all"}, "fields": fields, "batch_size": 5}
    connect(*service.routes).train(LAYERS, data, epochs=1)
    assert service.specs[0]["data"] == data


def test_the_fields_of_a_description_may_be_given_beside_it(connect: Connect):
    service = Recorder()
    fields = {"x": {"type": "dense", "shape": [4]}, "y": {"type": "integer", "dim": 3}}
    data = {"train": {"dataset": "ds_3", "split": "all"}, "batch_size": 5}
    connect(*service.routes).train(LAYERS, data, epochs=1, fields=fields)
    assert service.specs[0]["data"] == {**data, "fields": fields}
    with pytest.raises(ValueError, match="data has no fields"):
        connect(*service.routes).train(LAYERS, data, epochs=1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "exactly one of epochs"),
        ({"epochs": 1, "steps": 2}, "exactly one of epochs"),
        ({"epochs": 1, "learning_rate": 0.1}, "unknown options learning_rate"),
    ],
)
def test_a_wrong_option_is_reported_before_anything_is_sent(
    connect: Connect, options: dict[str, Any], told: str
):
    service = Recorder()
    with pytest.raises(TypeError, match=told):
        connect(*service.routes).train(LAYERS, (np.zeros((2, 2)), np.zeros(2)), **options)
    assert service.uploads == []


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ((np.zeros((2, 2)), np.zeros(3)), "same number of rows"),
        (np.zeros(3).tolist(), "pair or a dict"),
        ({"x": np.array([{}, []], object)}, "dtype object"),
        ({}, "no array"),
    ],
)
def test_arrays_that_cannot_be_rows_are_refused(connect: Connect, data: Any, told: str):
    with pytest.raises(ValueError, match=told):
        connect(*Recorder().routes).train(LAYERS, data, epochs=1)


def test_an_unclear_target_is_asked_for(connect: Connect):
    data = {"x": np.zeros((2, 2)), "y": np.zeros(2), "z": np.zeros(2)}
    with pytest.raises(ValueError, match=r"the target is ambiguous.* x, y, z"):
        connect(*Recorder().routes).train(LAYERS, data, epochs=1)


TRAINED = {
    "network": {"type": "graph", "layers": LAYERS},
    "data": {
        "fields": {
            "image": {"type": "dense", "shape": [2]},
            "label": {"type": "integer", "dim": 3},
        }
    },
}


def test_small_inputs_travel_in_the_spec(connect: Connect):
    service = Recorder(**{"fc/value": np.ones((2, 3), np.float32)})
    service.trained = TRAINED
    found = connect(*service.routes).infer("job_1", np.array([[1.0, 2], [3, 4]]), outputs=["fc"])
    np.testing.assert_array_equal(found["fc"], np.ones((2, 3)))
    assert service.specs[0] == {
        "kind": "infer",
        "job": "job_1",
        "outputs": ["fc"],
        "inputs": {"image": [[1.0, 2.0], [3.0, 4.0]]},
    }
    parse_job(jsonio.dumps(service.specs[0]))


@pytest.mark.parametrize("rows", [np.zeros((2, 2), np.uint8), np.zeros((20_000, 2), np.float32)])
def test_large_or_byte_inputs_travel_as_a_dataset(connect: Connect, rows: np.ndarray):
    service = Recorder(**{"fc/id": np.zeros(2, np.int64), "fc/prob": np.zeros(2, np.float32)})
    service.trained = TRAINED
    found = connect(*service.routes).infer("ckpt_1", rows, fields=["id", "prob"])
    assert sorted(found) == ["fc/id", "fc/prob"]
    assert service.uploads[0]["image_test"].dtype == rows.dtype
    assert service.specs[0]["checkpoint"] == "ckpt_1"
    field = {"type": "dense", "shape": [2], "column": "image"}
    rows_of = {"dataset": "ds_1", "split": "test", "fields": {"image": field}}
    assert service.specs[0]["data"] == rows_of
    parse_job(jsonio.dumps(service.specs[0]))
    assert service.deleted == ["ds_1"]


def test_rows_of_a_stored_dataset_can_be_inferred(connect: Connect):
    service = Recorder(**{"fc/value": np.zeros((1, 3), np.float32)})
    client = connect(*service.routes)
    client.infer("job_1", data={"dataset": "ds_2", "split": "test"})
    assert service.specs[0]["data"] == {"dataset": "ds_2", "split": "test"}
    with pytest.raises(TypeError, match="exactly one"):
        client.infer("job_1")


def test_a_dataset_that_cannot_be_read_says_why(connect: Connect):
    told = {"code": "invalid_dataset", "detail": "line 3 has 4 cells"}
    failed = answer({"id": "ds_1", "state": "failed", "problem": told})
    client = connect(Route("/api/v1/datasets/ds_1", lambda request: failed))
    with pytest.raises(gh.UnprocessableEntityError, match="line 3 has 4 cells") as caught:
        client.datasets.get("ds_1").wait()
    assert caught.value.code == "invalid_dataset"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.csv", "csv"),
        ("a.jsonl", "jsonl"),
        ("a.parquet", "parquet"),
        ("b.NPZ", "npz"),
        ("train-images-idx3-ubyte", "idx"),
        ("train-images-idx3-ubyte.gz", "idx.gz"),
        ("mnist.json.gz", "mnist.json.gz"),
        ("mnist.zip", "idx.zip"),
        ("clothes.images.zip", "images.zip"),
        ("book.txt", "text"),
    ],
)
def test_a_format_follows_from_the_name(connect: Connect, name: str, expected: str, tmp_path: Any):
    asked: list[str] = []

    async def upload(request: Request) -> Response:
        asked.append(request.query_params["format"])
        assert await request.body() == b"bytes"
        return problem(422)

    client = connect(Route("/api/v1/datasets", upload, methods=["POST"]))
    (tmp_path / name).write_bytes(b"bytes")
    with pytest.raises(gh.UnprocessableEntityError):
        client.datasets.upload(tmp_path / name)
    assert asked == [expected]


@pytest.mark.parametrize(
    ("resize", "expected"), [((24, 32), "24x32"), ("24x32", "24x32"), (None, None)]
)
def test_a_size_is_a_pair_or_a_text(resize: Any, expected: str | None):
    assert size_text(resize) == expected


@pytest.mark.parametrize("resize", ["24", "24*32", (24,), (24, 32, 3), (0, 1), (2.5, 3), 24])
def test_another_size_is_refused(resize: Any):
    with pytest.raises(ValueError, match="give height x width"):
        size_text(resize)


def test_a_name_that_does_not_show_the_format_is_refused(connect: Connect, tmp_path: Any):
    (tmp_path / "rows.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="format="):
        connect().datasets.upload(tmp_path / "rows.bin")
    with pytest.raises(ValueError, match="format is required"):
        connect().datasets.upload(b"1,2")
