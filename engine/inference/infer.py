"""Inference: run a trained network over rows, and return the outputs of any of its layers.

Shape suffixes: B = rows of a batch, N = all rows, C = the last axis, taken as classes.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import load_model
from engine.core.precision import dtype_name
from engine.core.problems import Findings
from engine.core.safetensors_writer import save_tensors
from engine.core.spool import now
from engine.core.tensor_names import root
from engine.data.augmentation.augmenting import unchanged
from engine.data.batches.rows import MemoryRows
from engine.data.columns.fields import BadField, network_shape
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.columns.table import Table
from engine.data.sources.inline import ValueMeaning, inline_rows
from engine.data.sources.loading import load
from engine.network.network import Network, needed_layers
from engine.network.sequence_lengths import stepwise
from engine.network.shapes import FieldShape, trace
from engine.training.control import RunControl
from engine.training.report import Outputs
from glasshouse import jsonio
from glasshouse.errors import DataFailed, SpecFailed
from glasshouse.spec import (
    DenseField,
    Field,
    Graph,
    InferJob,
    IntegerField,
    Sequences,
    Source,
    Trained,
    TrainJob,
)

CLASS_LOSSES = frozenset({"CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"})
"""Losses that compare scores of shape [rows, classes] with one class per row."""
SOFTMAXES = frozenset({"Softmax", "softmax", "LogSoftmax", "log_softmax"})
FILE = "predictions.csv"
MAX_LISTED = 1000
"""Number of unnamed classes that a result lists."""
RESULT_BYTES = 64 * 1024
"""Results up to this size are also given as JSON …"""
RESULT_JSON_BYTES = 256_000
"""… unless the JSON is longer than this."""
_TRACED_ROWS = 4


@dataclass(frozen=True)
class Inputs:
    """The weights and rows of an inference job."""

    checkpoint: Path
    table: Table | None
    device: torch.device


class Classes(NamedTuple):
    """The classes that the scores of a layer are for."""

    column: str
    """The data column with the true class."""
    named: tuple[Any, ...] | None
    """The names of the classes in order; None: the classes are their numbers."""
    number: int

    @property
    def values(self) -> list[Any]:
        """Return the classes in order."""
        return list(range(self.number)) if self.named is None else list(self.named)


def outputs_of(job: InferJob, graph: Graph) -> tuple[str, ...]:
    """Return the layers whose outputs are returned."""
    return job.outputs or graph.outputs or (graph.layers[-1].name,)


def fields_needed(job: InferJob, trained_by: Trained) -> dict[str, Field]:
    """Return the data fields that the requested outputs depend on; the others need not exist."""
    graph = trained_by.network
    layers = needed_layers(graph, outputs_of(job, graph))
    read = {root(name) for layer in layers for name in layer.reads}
    given = (job.data.fields if job.data is not None else None) or {}
    return {
        name: like_trained(given[name], field) if name in given else unchanged(field)
        for name, field in trained_by.data.fields.items()
        if name in read
    }


_LEARNED = ("dim", "classes", "tokens", "vocabulary", "fill")


def like_trained(given: Field, trained: Field) -> Field:
    """Fill the unset options of an inference field from the field used in training."""
    if type(given) is not type(trained):
        return given
    left_out = [key for key in _LEARNED if getattr(given, key, trained) is None]
    if getattr(given, "classes", None) is not None:
        left_out = [key for key in left_out if key != "dim"]
    return given.model_copy(update={key: getattr(trained, key) for key in left_out})


def not_as_trained(given: Field, trained: Field | None) -> tuple[str, str] | None:
    """Return key and reason if a field differs from training where it must not; else None."""
    if getattr(given, "augment", ()):
        return "augment", "only rows that are trained on are changed: leave it out"
    if trained is None:
        return None
    fill, learned = getattr(given, "fill", None), getattr(trained, "fill", None)
    if fill in ("mean", "median") and fill != learned:
        detail = f"the training rows' {fill} is not known: the network was trained with fill"
        return "fill", f"{detail} {jsonio.dumps(learned)}; give a number, or leave it out"
    for key in ("classes", "tokens", "vocabulary"):
        mine = getattr(given, key, None)
        if mine is not None and key != "classes" and mine != getattr(trained, key, None):
            return key, "the network was trained with another: leave it out"
    return None


def probabilities(layer_type: str, x_NC: Tensor) -> Tensor:
    """Convert a layer's output to probabilities: unchanged, by exp, or by softmax."""
    if layer_type in {"Softmax", "softmax"}:
        return x_NC
    if layer_type in {"LogSoftmax", "log_softmax"}:
        return x_NC.exp()
    return x_NC.float().softmax(dim=-1)


def read_field(field: str, layer_type: str, x_NC: Tensor) -> Tensor:
    """Return a field of an output: its value, the index of its maximum, or its probability."""
    if field == "value":
        return x_NC
    index_N1 = x_NC.argmax(dim=-1, keepdim=True)
    if field == "id":
        return index_N1.squeeze(-1)
    return probabilities(layer_type, x_NC).gather(-1, index_N1).squeeze(-1)


def run(
    job: InferJob, trained_by: Trained | None, inputs: Inputs, *, control: RunControl, out: Outputs
) -> str:
    """Run an inference job; return ``succeeded`` or ``cancelled``."""
    if trained_by is None:
        raise SpecFailed("The inference job was not told which job trained its checkpoint.")
    wanted = outputs_of(job, trained_by.network)
    network = Network(trained_by.network, wanted, prune=True)
    load_model(inputs.checkpoint, network, partial=True)
    network.to(inputs.device).eval()
    rows = _rows(job, trained_by, inputs)
    steps = _stepwise(trained_by, wanted, rows)
    types = {layer.name: layer.type for layer in trained_by.network.layers}
    known = classified(trained_by)
    known = {name: known[name] for name in wanted if name in known}
    reads = [
        (f"{name}/{field}", partial(read_field, field, types[root(name)]))
        for name in wanted
        for field in fields_of(job, name, known)
    ]
    pieces: dict[str, list[Tensor]] = {key: [] for key, _ in reads}
    lengths: dict[str, list[Tensor]] = {field: [] for field in steps.values()}
    batch_size = job.data.batch_size if job.data is not None else 256
    num_batches = rows.num_batches(batch_size)
    with torch.inference_mode():
        for number, batch in enumerate(rows.in_order(batch_size), start=1):
            if control.cancel_requested:
                return "cancelled"
            values = network(batch.tensors)
            for field, parts in lengths.items():
                parts.append(batch.lengths[field])
            for key, read in reads:
                pieces[key].append(read(values[key.rpartition("/")[0]]).cpu())
            record = {"type": "progress", "at": now(), "step": number, "num_steps": num_batches}
            record |= {"epoch": 0, "samples": min(number * batch_size, rows.num_rows)}
            out.emit(record | {"samples_per_s": None, "eta_s": None})
            out.settle()
        tensors: dict[str, Tensor] = {}
        for key, parts in pieces.items():
            name = key.rpartition("/")[0]
            if name not in steps:
                tensors[key] = torch.cat(parts)
                continue
            own = lengths[steps[name]]
            tensors[key] = (_packed if job.sequence_layout == "packed" else _padded)(parts, own)
            tensors[f"{name}/lengths"] = torch.cat(own)
    _write(join(job, wanted, tensors), known, out)
    return "succeeded"


def _rows(job: InferJob, trained_by: Trained, inputs: Inputs) -> MemoryRows:
    """Return the rows, cut as in the training job, all of them."""
    fields = fields_needed(job, trained_by)
    limit = trained_by.data.sequence
    most = limit.max_length if limit.overflow == "truncate" else None
    known = Prepared.of(inputs.checkpoint)
    preparing = replace(Preparing.of(trained_by.data, known), on_bad_row="fail")
    device = inputs.device
    if job.data is not None and inputs.table is not None:
        source = Source(dataset=job.data.dataset, split=job.data.split)
        cut = Sequences(max_length=most)
        return load(
            source, fields, inputs.table, seed=0, device=device, limit=cut, preparing=preparing
        )
    meaning = ValueMeaning(fields, preparing)
    try:
        return inline_rows(job.inputs or {}, inline_shapes(fields), device, most, meaning)
    except (BadField, KeyError) as cause:
        raise DataFailed(f"The inputs do not fit the network: {cause}") from cause


def _stepwise(trained_by: Trained, wanted: Sequence[str], rows: MemoryRows) -> dict[str, str]:
    """Return the sequence field of each requested output that has a value per step."""
    shapes = inline_shapes({name: trained_by.data.fields[name] for name in rows.fields})
    longest = rows.longest()
    if not longest:
        return {}
    for name, length in longest.items():
        shapes[name] = replace(shapes[name], shape=(length, *shapes[name].shape[1:]))
    layers = tuple(needed_layers(trained_by.network, wanted))
    pruned = trained_by.network.model_copy(update={"layers": layers, "outputs": None})
    traced = trace(pruned, shapes, _TRACED_ROWS, Findings())
    found = stepwise(traced, shapes, _TRACED_ROWS)
    return {name: found[name] for name in wanted if name in found}


def inline_shapes(fields: Mapping[str, Field]) -> dict[str, FieldShape]:
    """Return the shapes of inline values; a resolved dense field knows its shape."""
    return {
        name: FieldShape(field.shape or (), torch.float32)
        if isinstance(field, DenseField)
        else network_shape(field, 1, field.dim)
        for name, field in fields.items()
    }


def _packed(parts: Sequence[Tensor], lengths: Sequence[Tensor]) -> Tensor:
    """Concatenate the valid steps of all rows."""
    both = zip(parts, lengths, strict=True)
    return torch.cat([part[torch.arange(part.shape[1]) < own[:, None]] for part, own in both])


def _padded(parts: Sequence[Tensor], lengths: Sequence[Tensor]) -> Tensor:
    """Pad all rows with zeros to the longest."""
    widest = max(part.shape[1] for part in parts)
    num_rows = sum(len(part) for part in parts)
    joined = parts[0].new_zeros((num_rows, widest, *parts[0].shape[2:]))
    first = 0
    for part, own in zip(parts, lengths, strict=True):
        is_step = torch.arange(part.shape[1]) < own[:, None]
        joined[first : first + len(part), : part.shape[1]][is_step] = part[is_step]
        first += len(part)
    return joined


def join(job: InferJob, wanted: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the layers of each field if requested: along rows (0) or columns (1)."""
    if job.flatten is False:
        return tensors
    joined: dict[str, Tensor] = {}
    for field in job.fields or ("value",):
        parts = [tensors[f"{name}/{field}"] for name in wanted]
        flat = [part.reshape(part.shape[0], -1) for part in parts]
        joined[field] = torch.cat(flat, dim=job.flatten.axis)
    return joined | {name: item for name, item in tensors.items() if name.endswith("/lengths")}


def _write(tensors: dict[str, Tensor], known: Mapping[str, Classes], out: Outputs) -> None:
    """Write the result files; also emit small results as an event."""
    out.flush()
    directory = out.directory / "artifacts"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "outputs.safetensors"
    save_tensors(path, tensors, names_in(known, tensors))
    _tell_of(path, "application/vnd.safetensors", out)
    table = directory / FILE
    if _write_table(table, tensors, known):
        _tell_of(table, "text/csv", out)
    classes = {name: item for name, item in tensors.items() if name.rpartition("/")[0] in known}
    found = _small(tensors, known)
    if found is None and classes:  # the classes alone may be small
        found = _small({n: item for n, item in classes.items() if n[-6:] != "/value"}, known)
    if found is not None:
        out.emit({"type": "result", "at": now(), "result": found})


def _tell_of(path: Path, media_type: str, out: Outputs) -> None:
    record = {"type": "artifact", "at": now(), "name": path.name, "media_type": media_type}
    out.emit(record | {"file": f"artifacts/{path.name}", "size_bytes": path.stat().st_size})


def _small(tensors: dict[str, Tensor], known: Mapping[str, Classes]) -> dict[str, Any] | None:
    """Return the results as JSON; None: there are none, or they are too large."""
    size = sum(item.numel() * item.element_size() for item in tensors.values())
    if not tensors or size > RESULT_BYTES:
        return None
    result = as_result(tensors)
    for name, classes in known.items():
        if f"{name}/id" in tensors:
            result[name] |= _told(classes, tensors[f"{name}/id"])
    return result if len(jsonio.dumps(result)) <= RESULT_JSON_BYTES else None


def as_result(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Convert tensors named ``layer/field`` to nested JSON; a joined one has only its field."""
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


# --- classes ---------------------------------------------------------------------------------


def classified(trained_by: Trained) -> dict[str, Classes]:
    """Return the layers whose outputs are class scores: the inputs of a classification loss.

    A softmax over such an output has the same classes.
    """
    found: dict[str, Classes] = {}
    for loss in trained_by.losses if isinstance(trained_by, TrainJob) else ():
        field = trained_by.data.fields.get(loss.inputs[-1])
        if loss.type in CLASS_LOSSES and isinstance(field, IntegerField):
            column = field.column or loss.inputs[-1]
            found[loss.inputs[0]] = Classes(column, field.classes, field.dim or 0)
    for layer in trained_by.network.layers:
        read = (layer.inputs or ())[:1]
        if layer.type in SOFTMAXES and read and read[0] in found:
            found[layer.name] = found[read[0]]
    return found


def fields_of(job: InferJob, name: str, known: Mapping[str, Classes]) -> tuple[str, ...]:
    """Return the fields that an inference returns for a layer."""
    if job.fields is not None:
        return job.fields
    has_classes = job.flatten is False and name in known
    return ("value", "id", "prob") if has_classes else ("value",)


def names_in(known: Mapping[str, Classes], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the metadata with names in the outputs' file: ``<layer>/classes``, a JSON list."""
    return {
        f"{name}/classes": jsonio.dumps(list(classes.named))
        for name, classes in known.items()
        if classes.named is not None and f"{name}/id" in tensors
    }


def _told(classes: Classes, ids_N: Tensor) -> dict[str, Any]:
    """Return a layer's result entries besides its tensors: all classes, and each row's."""
    values = classes.values
    dtype = "string" if values and isinstance(values[0], str) else "int64"
    found: dict[str, Any] = {}
    if classes.named is not None or classes.number <= MAX_LISTED:
        shape = [len(values)]
        found["classes"] = {"dtype": dtype, "shape": shape, "data": values}
        found["classes"]["column"] = classes.column
    if classes.named is not None:
        data = [values[number] for number in ids_N.tolist()]
        found["class"] = {"dtype": dtype, "shape": [len(data)], "data": data}
    return found


def _write_table(path: Path, tensors: Mapping[str, Tensor], known: Mapping[str, Classes]) -> bool:
    """Write a line per row: its number, and each layer's class and its probability.

    Return whether there is anything to write.
    """
    columns: dict[str, Sequence[Any]] = {}
    for name, classes in known.items():
        ids_N = tensors.get(f"{name}/id")
        if ids_N is None:
            continue
        columns[f"{name}/id"] = ids_N.tolist()
        if classes.named is not None:
            columns[f"{name}/class"] = [classes.named[number] for number in ids_N.tolist()]
        if f"{name}/prob" in tensors:
            columns[f"{name}/prob"] = tensors[f"{name}/prob"].tolist()
    if not columns:
        return False
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", *columns])
        writer.writerows(
            [row, *cells] for row, cells in enumerate(zip(*columns.values(), strict=True))
        )
    return True
