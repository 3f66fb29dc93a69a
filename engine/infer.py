"""Inference: a trained network over rows, and the outputs of any of its layers.

Shape suffixes: B = rows of a batch, N = all rows, C = the last axis, taken as classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.checkpoint import load_model
from engine.data import BadField, Rows, Table, inline_rows, load
from engine.network import Network, dtype_name, needed_layers, root
from engine.report import Control, Outputs
from engine.shapes import FieldShape
from engine.spool import now
from glasshouse import jsonio
from glasshouse.errors import DataFailed, SpecFailed
from glasshouse.spec import Field, Graph, InferJob, IntegerField, Source, TrainJob

RESULT_BYTES = 64 * 1024
"""Results up to this size are also given as JSON …"""
RESULT_JSON_BYTES = 256_000
"""… unless that is longer than this."""


@dataclass(frozen=True)
class Inputs:
    """Where an inference job's weights and rows are."""

    checkpoint: Path
    table: Table | None
    device: torch.device


def outputs_of(job: InferJob, graph: Graph) -> tuple[str, ...]:
    """The layers whose outputs are returned."""
    return job.outputs or graph.outputs or (graph.layers[-1].name,)


def fields_needed(job: InferJob, trained_by: TrainJob) -> dict[str, Field]:
    """The data fields that the wanted outputs depend on; the others need not exist."""
    graph = trained_by.network
    layers = needed_layers(graph, outputs_of(job, graph))
    read = {root(name) for layer in layers for name in layer.inputs or ()}
    given = (job.data.fields if job.data is not None else None) or {}
    return {
        name: given.get(name, field)
        for name, field in trained_by.data.fields.items()
        if name in read
    }


def probabilities(layer_type: str, x_NC: Tensor) -> Tensor:
    """A layer's output as probabilities: as it is, through exp, or through softmax."""
    if layer_type in {"Softmax", "softmax"}:
        return x_NC
    if layer_type in {"LogSoftmax", "log_softmax"}:
        return x_NC.exp()
    return x_NC.float().softmax(dim=-1)


def read_field(field: str, layer_type: str, x_NC: Tensor) -> Tensor:
    """One field of an output: its value, the index of its largest entry, or that one's share."""
    if field == "value":
        return x_NC
    index_N1 = x_NC.argmax(dim=-1, keepdim=True)
    if field == "id":
        return index_N1.squeeze(-1)
    return probabilities(layer_type, x_NC).gather(-1, index_N1).squeeze(-1)


def run(
    job: InferJob, trained_by: TrainJob | None, inputs: Inputs, *, control: Control, out: Outputs
) -> str:
    """Run an inference job; returns ``succeeded`` or ``cancelled``."""
    if trained_by is None:
        raise SpecFailed("The inference job was not told which job trained its checkpoint.")
    wanted = outputs_of(job, trained_by.network)
    network = Network(trained_by.network, wanted, prune=True)
    load_model(inputs.checkpoint, network, partial=True)
    network.to(inputs.device).eval()
    rows = _rows(job, trained_by, inputs)
    types = {layer.name: layer.type for layer in trained_by.network.layers}
    batch_size = job.data.batch_size if job.data is not None else 256
    pieces = _forward(job, network, rows, (wanted, types, batch_size), control=control, out=out)
    if pieces is None:
        return "cancelled"
    tensors = join(job, wanted, {name: torch.cat(parts) for name, parts in pieces.items()})
    _write(tensors, out)
    return "succeeded"


def _rows(job: InferJob, trained_by: TrainJob, inputs: Inputs) -> Rows:
    fields = fields_needed(job, trained_by)
    if job.data is not None and inputs.table is not None:
        source = Source(dataset=job.data.dataset, split=job.data.split)
        return load(source, fields, inputs.table, seed=0, device=inputs.device)
    try:
        return inline_rows(job.inputs or {}, inline_shapes(fields), inputs.device)
    except (BadField, KeyError) as cause:
        raise DataFailed(f"The inputs do not fit the network: {cause}") from cause


def inline_shapes(fields: Mapping[str, Field]) -> dict[str, FieldShape]:
    """What inline values must look like; a resolved dense field knows its shape."""
    shapes: dict[str, FieldShape] = {}
    for name, field in fields.items():
        if isinstance(field, IntegerField):
            shapes[name] = FieldShape((), torch.int64, field.dim)
        else:
            shapes[name] = FieldShape(field.shape or (), torch.float32)
    return shapes


@torch.inference_mode()
def _forward(
    job: InferJob,
    network: nn.Module,
    rows: Rows,
    plan: tuple[tuple[str, ...], dict[str, str], int],
    *,
    control: Control,
    out: Outputs,
) -> dict[str, list[Tensor]] | None:
    """All batches; the pieces of each ``layer/field``, or None when cancelled."""
    wanted, types, batch_size = plan
    pieces: dict[str, list[Tensor]] = {}
    num_batches = rows.num_batches(batch_size)
    for number, batch in enumerate(rows.in_order(batch_size)):
        if control.cancel_requested:
            return None
        values = network(batch)
        for name in wanted:
            for field in job.fields:
                piece = read_field(field, types[root(name)], values[name])
                pieces.setdefault(f"{name}/{field}", []).append(piece.cpu())
        done = min((number + 1) * batch_size, rows.num_rows)
        out.emit(_progress(number + 1, num_batches, done))
        out.settle()
    return pieces


def _progress(step: int, num_steps: int, samples: int) -> dict[str, Any]:
    return {
        "type": "progress",
        "at": now(),
        "step": step,
        "num_steps": num_steps,
        "epoch": 0,
        "samples": samples,
        "samples_per_s": None,
        "eta_s": None,
    }


def join(job: InferJob, wanted: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Flatten when asked: per field, all layers below each other (0) or side by side (1)."""
    if job.flatten is False:
        return tensors
    joined: dict[str, Tensor] = {}
    for field in job.fields:
        parts = [tensors[f"{name}/{field}"] for name in wanted]
        flat = [part.reshape(part.shape[0], -1) for part in parts]
        joined[field] = torch.cat(flat, dim=job.flatten.axis)
    return joined


def _write(tensors: dict[str, Tensor], out: Outputs) -> None:
    out.flush()
    directory = out.directory / "artifacts"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "outputs.safetensors"
    save_file({name: item.contiguous() for name, item in tensors.items()}, path)
    out.emit(
        {
            "type": "artifact",
            "at": now(),
            "name": path.name,
            "file": f"artifacts/{path.name}",
            "media_type": "application/vnd.safetensors",
            "size_bytes": path.stat().st_size,
        }
    )
    size = sum(item.numel() * item.element_size() for item in tensors.values())
    if size <= RESULT_BYTES:
        result = as_result(tensors)
        if len(jsonio.dumps(result)) <= RESULT_JSON_BYTES:
            out.emit({"type": "result", "at": now(), "result": result})


def as_result(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors named ``layer/field`` as nested JSON; a joined one is under its field alone."""
    result: dict[str, Any] = {}
    for name, item in tensors.items():
        layer, _, field = name.rpartition("/")
        entry = {
            "dtype": dtype_name(item.dtype),
            "shape": list(item.shape),
            "data": item.tolist(),
        }
        (result.setdefault(layer, {}) if layer else result)[field] = entry
    return result
