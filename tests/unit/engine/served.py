"""Trained networks for the tests of serving: what they read, and what plain torch computes."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.data.batches.rows import tensors_of
from engine.data.columns.table import Table
from engine.datasets.ingest import ingest
from engine.inference.blocks import Column
from engine.inference.rows import Inputs, rows_of
from engine.network.network import Network
from engine.serving import responses
from engine.serving.requests import Asked, BadRequest, ModelInputs, read
from engine.serving.served_models import ServedVersion, VersionName
from glasshouse.spec import Trained, parse_job, parse_trained
from tests.unit.engine.runs import of_type, planned, run

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Served:
    """A trained network."""

    resolved: dict[str, Any]
    trained_by: Trained
    checkpoint: Path
    version: ServedVersion

    def network(self, outputs: tuple[str, ...]) -> Network:
        """The network with its weights."""
        made = Network(self.trained_by.network, outputs)
        made.load_state_dict(load_file(self.checkpoint / "model.safetensors"))
        return made.eval()

    def compute(self, asked: Asked) -> dict[str, Column]:
        """The outputs of a request."""
        (found,) = self.version.compute([asked])
        return found

    @property
    def inputs(self) -> ModelInputs:
        """What it reads."""
        return self.version.inputs

    def answer(
        self, body: bytes | dict[str, Any], max_rows: int = 100, **head: Any
    ) -> tuple[dict[str, Any], bytes]:
        """The head and the body of the answer to a request."""
        asked = self.read(body, max_rows, **head)
        return responses.write(
            asked, self.compute(asked), self.inputs, {"model": "m", "version": 3}
        )

    def read(self, body: bytes | dict[str, Any], max_rows: int = 100, **head: Any) -> Asked:
        """A request that fits."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        whole = {"protocol": "predict", "content_type": "application/json", **head}
        return read(whole, content, self.inputs, max_rows)

    def problems(self, body: bytes | dict[str, Any], **head: Any) -> dict[str, str]:
        """What is wrong with a request, by pointer."""
        try:
            self.read(body, **head)
        except BadRequest as error:
            return {item.pointer: item.detail for item in error.problems}
        raise AssertionError("the request was accepted")

    def status(self, body: bytes | dict[str, Any], **head: Any) -> int:
        """The status of the refusal of a request."""
        try:
            self.read(body, **head)
        except BadRequest as error:
            return error.status
        raise AssertionError("the request was accepted")

    def in_a_job(self, table: Path, outputs: tuple[str, ...] | None = None) -> dict[str, Tensor]:
        """The batch that an inference job makes of all rows of a dataset."""
        data = {"dataset": "ds_1", "split": next(iter(Table(table).meta["splits"]))}
        spec = {"kind": "infer", "job": "job_x", "data": data}
        job = parse_job(json.dumps(spec | ({"outputs": outputs} if outputs else {})))
        inputs = Inputs(self.checkpoint, Table(table), CPU)
        rows = rows_of(job, self.trained_by, inputs, look=lambda _: None, bad_rows=io.StringIO())
        try:
            return rows.batch(slice(0, rows.num_rows)).tensors
        finally:
            rows.close()


def batch_of(asked: Asked) -> Mapping[str, Tensor]:
    """The batch of all rows of a request."""
    every = slice(0, asked.num_rows)
    return tensors_of(asked.rows, every, every, CPU)[0]


def served(directory: Path, spec: dict[str, Any], table: Path) -> Served:
    """Train a network."""
    meta = json.loads((table / "meta.json").read_text())
    resolved = planned(spec, meta)["spec"]
    records = run(directory, spec, table)
    checkpoint = directory / of_type(records, "checkpoint")[-1]["dir"]
    trained_by = parse_trained(json.dumps(resolved))
    assert trained_by is not None
    version = ServedVersion(VersionName("m", 3, "ckpt_1", checkpoint), trained_by, CPU, 5)
    return Served(resolved, trained_by, checkpoint, version)


def uploaded(directory: Path, name: str, content: str | bytes, form: str) -> Path:
    """A dataset as it is read from an uploaded file."""
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / name
    source.write_bytes(content.encode() if isinstance(content, str) else content)
    ingest(source, form, directory / f"{name}.dataset")
    return directory / f"{name}.dataset"


def jsonl(directory: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """A dataset of the same rows."""
    return uploaded(directory, name, "".join(json.dumps(row) + "\n" for row in rows), "jsonl")
