"""What an installed package registers is found everywhere, without a change of the service.

A temporary folder is what ``pip install`` would fill: a package, and the metadata with its entry
points. Only the service's processes have it on their path; client and command line do not.
"""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx2
import pytest

import glasshouse as gh
from engine.data.augmentation.augmenting import APPLIED
from glasshouse import plugins
from glasshouse.cli.jobs import probes, results
from glasshouse.client.data import statistics
from glasshouse.spec import augmentation
from glasshouse.spec.tensor_kinds import LISTED, TENSOR_KINDS
from tests.running import Api, running_api

ROOT = Path(__file__).parents[2]
READER = '''
"""Reads fasta files: the lines between two lines that begin with >."""

from engine.datasets.reading import Format
from glasshouse.errors import InvalidDataset


def read_fasta(path, writer, options):
    head, *records = path.read_text().split(">")
    if head:
        raise InvalidDataset("a fasta file begins with >")
    writer.texts("all", "sequence").append(
        ["".join(record.split("\\n")[1:]).encode() for record in records]
    )


FORMAT = Format(
    name="fasta",
    summary="Sequences of letters.",
    read=read_fasta,
    suffixes=(".fasta", ".fa"),
    media_types=("text/x-fasta",),
)
'''
NETWORK = '''
"""A layer and a loss that torch does not have."""

from torch import Tensor, nn


class Scaled(nn.Module):
    """Multiplies its input by a factor."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class LogCosh(nn.Module):
    """The logarithm of the hyperbolic cosine of the difference."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        each = (input - target).cosh().log()
        return each.mean() if self.reduction == "mean" else each.sum()
'''
POINTS = """
[glasshouse.formats]
fasta = bench_tools.reader:FORMAT
[glasshouse.layers]
Scaled = bench_tools.network:Scaled
[glasshouse.losses]
LogCosh = bench_tools.network:LogCosh
"""
RECORDS = ">one\nACGT\nAC\n>two\nTTT\n"


def install(folder: Path, points: str = POINTS) -> None:
    """Fill a folder as ``pip install --target`` does."""
    package = folder / "bench_tools"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "reader.py").write_text(READER)
    (package / "network.py").write_text(NETWORK)
    metadata = folder / "bench_tools-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-tools\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[Api]:
    """An API and the reader of uploads, in whose environment the package is installed."""
    folder = tmp_path_factory.mktemp("site-packages")
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        with running_api() as api:
            yield api


@pytest.fixture(scope="module")
def http(service: Api) -> Generator[httpx2.Client]:
    with service.client(service.key("ada")) as opened:
        yield opened


def entries(http: httpx2.Client, section: str) -> dict[str, dict[str, Any]]:
    found = http.get(f"/api/v1/catalog/{section}").raise_for_status().json()["entries"]
    return {entry["name"]: entry for entry in found}


@pytest.mark.long
def test_a_format_is_in_the_catalog_from_which_the_form_is_drawn(http: httpx2.Client):
    found = entries(http, "datasets")["fasta"]
    assert found == {
        "name": "fasta",
        "kind": "format",
        "summary": "Sequences of letters.",
        "suffixes": [".fasta", ".fa"],
        "media_types": ["text/x-fasta"],
        "schema": {"type": "object", "properties": {}, "required": []},
        "inputs": None,
    }
    source = (ROOT / "dashboard/src/views/datasets/upload.tsx").read_text()
    assert '"catalog/datasets"' in source
    assert "csv" not in source, "the form has a list of its own"


def test_the_api_describes_and_checks_the_format(http: httpx2.Client):
    assert "fasta" in http.get("/api/v1/").json()["capabilities"]["dataset_formats"]
    operation = http.get("/openapi.json").json()["paths"]["/api/v1/datasets"]["post"]
    (told,) = [one for one in operation["parameters"] if one["name"] == "format"]
    assert "fasta" in told["description"]
    refused = http.post("/api/v1/datasets", params={"format": "avro"}, content=b"x")
    assert refused.status_code == 422
    assert "fasta" in refused.text
    wrong = http.post("/api/v1/datasets", params={"format": "fasta", "header": True}, content=b"x")
    assert "it is for the formats csv and tsv only" in wrong.text


@pytest.mark.parametrize(
    ("name", "media_type"), [("x.FA", "application/octet-stream"), (None, "text/x-fasta")]
)
def test_the_api_infers_the_format(http: httpx2.Client, name: str | None, media_type: str):
    params = {} if name is None else {"name": name}
    headers = {"Content-Type": media_type}
    answer = http.post("/api/v1/datasets", params=params, content=RECORDS, headers=headers)
    assert answer.status_code == 201, answer.text
    assert answer.json()["format"] == "fasta"


@pytest.mark.long
def test_the_client_uploads_a_file_by_its_name(service: Api, tmp_path: Path):
    (tmp_path / "genes.fasta").write_text(RECORDS)
    with gh.Client(service.url, service.key("grace")) as client:
        dataset = client.datasets.upload(tmp_path / "genes.fasta")
        assert dataset.data["format"] == "fasta"
        assert [row["sequence"] for row in dataset.rows()] == ["ACGTAC", "TTT"]
        (tmp_path / "wrong.fa").write_text("ACGT")
        with pytest.raises(gh.UnprocessableEntityError, match="begins with >"):
            client.datasets.upload(tmp_path / "wrong.fa")
        with pytest.raises(ValueError, match="fasta"):
            client.datasets.upload(__file__)


@pytest.mark.long
def test_the_command_line_lists_and_uploads_it(service: Api, tmp_path: Path):
    (tmp_path / "genes.fa").write_text(RECORDS)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "GLASSHOUSE_URL": service.url,
        "GLASSHOUSE_API_KEY": service.key("alan"),
        "GLASSHOUSE_HOME": str(tmp_path),
    }

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "glasshouse.cli", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "fasta          .fasta .fa" in run("datasets", "formats")
    uploaded = json.loads(run("datasets", "upload", str(tmp_path / "genes.fa"), "--json"))
    assert uploaded["splits"] == {"all": 2}


@pytest.mark.long
def test_a_layer_and_a_loss_are_in_the_catalog_and_in_a_plan(http: httpx2.Client):
    layer, loss = entries(http, "layers")["Scaled"], entries(http, "losses")["LogCosh"]
    assert layer["summary"] == "Multiplies its input by a factor."
    assert layer["schema"]["properties"]["factor"]["default"] == 2.0
    assert layer["inputs"] == {"min": 1, "max": 1}
    assert loss["summary"].startswith("The logarithm")
    dataset = http.post("/api/v1/datasets", params={"format": "csv"}, content="x,y\n1.5,2\n").json()
    read = http.get(f"/api/v1/datasets/{dataset['id']}", headers={"Prefer": "wait=60"}).json()
    assert read["state"] == "ready"
    spec: dict[str, Any] = {
        "kind": "train",
        "network": {
            "layers": [
                {"name": "fc", "type": "Linear", "args": {"out_features": 1}, "inputs": ["x"]},
                {"name": "scaled", "type": "Scaled", "args": {"factor": 3.0}},
            ]
        },
        "loss": {"type": "LogCosh", "inputs": ["scaled", "y"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.01}},
        "data": {
            "train": {"dataset": dataset["id"]},
            "fields": {"x": {"type": "dense", "shape": [1]}, "y": {"type": "dense", "shape": [1]}},
            "batch_size": 1,
        },
        "stop": {"steps": 1},
    }
    plan = http.post("/api/v1/plan", json=spec)
    assert plan.status_code == 200, plan.text
    assert [row["type"] for row in plan.json()["layers"]] == ["Linear", "Scaled"]
    spec["network"]["layers"][1]["args"] = {"factors": 3.0}
    refused = http.post("/api/v1/plan", json=spec)
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "/network/layers/1/args/factors"


def test_every_kind_of_tensor_is_where_users_choose_one(http: httpx2.Client):
    assert http.get("/api/v1/").json()["capabilities"]["tensor_kinds"] == [*TENSOR_KINDS]
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["Probe"]["properties"]["kinds"]["items"]["enum"] == [*TENSOR_KINDS]
    assert get_args(statistics.Kind) == (*TENSOR_KINDS,)
    told = inspect.getdoc(gh.Job.probe) or ""
    form = (ROOT / "dashboard/src/views/inside/kinds.ts").read_text()
    for kind in TENSOR_KINDS:
        assert f"``{kind}``" in told
        assert f"  {kind}: " in form
    for command in (probes.probe, results.layers):
        texts = [getattr(one, "help", "") or "" for one in options_of(command)]
        assert any(LISTED in text for text in texts), command


def test_every_augmentation_of_the_spec_is_applied_described_and_in_the_schema(http: httpx2.Client):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    offered = schemas["DenseField"]["properties"]["augment"]["items"]["discriminator"]["mapping"]
    page = (ROOT / "docs/reference/spec.md").read_text()
    assert {*offered} == {*APPLIED}
    assert {*offered} <= {model.__name__ for model in augmentation.MODELS}
    assert all(f"## {model.__name__}\n" in page for model in augmentation.MODELS)


def options_of(command: Callable[..., Any]) -> list[Any]:
    """The typer options of each argument of a command."""
    hints = get_type_hints(command, include_extras=True).values()
    return [part for hint in hints for part in getattr(hint, "__metadata__", ())]


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ("[glasshouse.layers]\nLinear = bench_tools.network:Scaled", "the name of an included one"),
        ("[glasshouse.layers]\nScaled = bench_tools.reader:FORMAT", "a subclass of Module"),
        ("[glasshouse.layers]\nScaled = bench_tools.nothing:Scaled", "cannot be loaded"),
    ],
)
@pytest.mark.long
def test_what_cannot_be_used_is_named(
    points: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path, points)
    code = "from engine.network.layer_types import layer_classes; layer_classes()"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert says in done.stderr
    assert plugins.PluginError.__name__ in done.stderr


def test_the_api_loads_no_large_library_for_the_formats():
    code = (
        "import sys; from engine.datasets.formats import formats; assert len(formats()) >= 12;"
        "print(sorted({'torch', 'pyarrow', 'PIL'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n", done.stderr
