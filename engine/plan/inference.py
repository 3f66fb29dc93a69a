"""Plan inference: check the request against what the network was trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.core.problems import Findings, one
from engine.core.tensor_names import root
from engine.data.columns.fields import BadField
from engine.data.columns.prepared import Preparing
from engine.data.sources.inline import ValueMeaning, inline_rows
from engine.inference import rows as inference_rows
from engine.inference.classes import TOP_K
from engine.inference.rows import inline_shapes, outputs_of
from engine.network.network import needed_layers
from engine.network.sequence_lengths import stepwise
from engine.network.shapes import FieldShape, Trace, trace
from engine.plan import data as plan_data
from engine.plan import data_memory
from engine.plan.costs import memory, table
from engine.plan.data import Metas
from glasshouse.spec import Field, Graph, InferJob, Trained

MAX_CSV_COLUMNS = 10_000
"""The most columns of one layer in a csv file."""


def plan_inference(spec: InferJob, datasets: Metas, trained_by: Trained) -> dict[str, Any]:
    """Plan a job that runs a trained network.

    Raises:
        SpecProblems: the job cannot run as it is written.
    """
    findings = Findings()
    fields = _infer_fields(spec, trained_by, findings)
    findings.stop()
    shapes, num_rows, data_bytes = _inputs(spec, fields, datasets, trained_by, findings)
    size = spec.data.batch_size if spec.data else 256
    batch_size = min(size, num_rows)
    wanted = outputs_of(spec, trained_by.network)
    traced = trace(_pruned(trained_by.network, wanted), shapes, batch_size, findings)
    steps = stepwise(traced, shapes, batch_size)
    _check_outputs(spec, wanted, traced, (batch_size, steps), findings)
    findings.stop()
    update: dict[str, Any] = {"outputs": tuple(wanted)}
    if spec.data is not None:
        full = plan_data.with_sizes(fields, shapes)
        update["data"] = spec.data.model_copy(update={"fields": full})
    return {
        "spec": spec.model_copy(update=update).model_dump(mode="json"),
        **table(traced),
        "memory": memory(traced, traced.network(), 0, data_bytes=data_bytes, training=False),
        "parallel": None,
        "probes": [],
        "num_steps": -(-num_rows // size),
        "warnings": [item.as_dict() for item in findings.warnings],
    }


def _inputs(
    spec: InferJob,
    fields: Mapping[str, Field],
    datasets: Metas,
    trained_by: Trained,
    findings: Findings,
) -> tuple[dict[str, FieldShape], int, int]:
    """Return the shapes of the network's inputs, the number of rows, and their bytes."""
    data = trained_by.data
    if spec.data is None:
        shapes = inline_shapes(fields)
        return shapes, _check_inline(spec, shapes, ValueMeaning(fields, Preparing.of(data))), 0
    dim = plan_data.window_dim(trained_by)
    datasets = plan_data.seen_as_windows(datasets, data.windows, None, dim)
    meta = plan_data.meta_of(spec.data, datasets, "/data", findings)
    shapes = plan_data.field_shapes(fields, meta, findings, spec.data)
    findings.stop()
    num_bytes = data_memory.inference_bytes(fields, spec.data, data, meta)
    return shapes, data_memory.rows_of(spec.data, meta), num_bytes


def _pruned(graph: Graph, wanted: Sequence[str]) -> Graph:
    layers = tuple(needed_layers(graph, wanted))
    if not layers:
        raise one("/outputs", "none of these is a layer of the network", "unknown_layer")
    return graph.model_copy(update={"layers": layers, "outputs": None})


def _infer_fields(spec: InferJob, trained_by: Trained, findings: Findings) -> dict[str, Field]:
    """Return the needed fields; given ones must match those of training."""
    known = {layer.name for layer in trained_by.network.layers}
    for number, name in enumerate(spec.outputs or ()):
        if root(name) not in known:
            listed = ", ".join(list(known)[:30])
            detail = f"the network has no layer {name!r}; it has: {listed}"
            findings.problem(f"/outputs/{number}", detail, "unknown_layer")
    fields = inference_rows.fields_needed(spec, trained_by)
    _check_given(spec, trained_by.data.fields, findings)
    if spec.inputs is not None:
        for name in fields:
            if name not in spec.inputs:
                detail = f"the network needs the input {name!r}"
                findings.problem("/inputs", detail, "missing_input")
    return fields


def _check_given(spec: InferJob, trained: Mapping[str, Field], findings: Findings) -> None:
    own = (spec.data.fields if spec.data is not None else None) or {}
    for name, field in own.items():
        problem = inference_rows.not_as_trained(field, trained.get(name))
        if problem is not None:
            findings.problem(f"/data/fields/{name}/{problem[0]}", problem[1], "trained_otherwise")
    given = spec.data.fields if spec.data is not None else spec.inputs
    base = "/data/fields" if spec.data is not None else "/inputs"
    for name in given or ():
        if name not in trained:
            detail = f"the network has no field {name!r}; it has: {', '.join(trained)}"
            findings.problem(f"{base}/{name}", detail, "unknown_field")


def _check_inline(spec: InferJob, shapes: dict[str, FieldShape], meaning: ValueMeaning) -> int:
    """Check inline values; return their number of rows, and put the longest into the shapes."""
    cpu = torch.device("cpu")
    try:
        rows = inline_rows(dict(spec.inputs or {}), shapes, cpu, meaning=meaning)
    except BadField as cause:
        pointer = f"/inputs/{cause.key}" if cause.key else "/inputs"
        raise one(pointer, str(cause), "shape") from cause
    for name, longest in rows.longest().items():
        shapes[name] = replace(shapes[name], shape=(longest, *shapes[name].shape[1:]))
    return rows.num_rows


def _check_outputs(
    spec: InferJob,
    wanted: Sequence[str],
    traced: Trace,
    known: tuple[int, Mapping[str, str]],
    findings: Findings,
) -> None:
    batch_size, steps = known
    _check_packed(spec, wanted, steps, findings)
    widths: dict[str, dict[str, int]] = {}
    for number, name in enumerate(wanted):
        if name not in traced.values:
            listed = ", ".join(leaf for leaf in traced.values if root(leaf) == root(name))
            detail = f"there is no {name!r}; there is: {listed}"
            findings.problem(f"/outputs/{number}", detail, "leaf")
            continue
        shape = traced.values[name].shape
        axes = 2 if name in steps else 1
        first = axes if spec.sequence_layout == "packed" else 1
        for field, width in _widths(spec, shape, first).items():
            widths.setdefault(field, {})[name] = width
        if not len(shape) or shape[0] != batch_size:
            detail = f"the first axis of {name!r}, of shape {list(shape)}, is not the rows"
            findings.problem(f"/outputs/{number}", detail, "no_rows_axis")
        if len(shape) <= axes:
            _check_class_axis(spec, name, shape, findings)
        elif len(shape):
            _check_top_k(spec, name, shape, findings)
        _check_table(spec, name, shape, name in steps, findings)
    if spec.flatten is False or spec.flatten.axis != 0:
        return
    for field, found in widths.items():
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name!r} has {width}" for name, width in found.items())
            detail = f"to join {field} below each other, all layers need as many values per row:"
            findings.problem("/flatten/axis", f"{detail} {listed}; set flatten to false", "shape")


def _widths(spec: InferJob, shape: torch.Size, first: int) -> dict[str, int]:
    """Return the number of values for each row, by field; ``first``: the axis after the rows."""
    if len(shape) <= first:
        return {"value": 1}
    asked = spec.fields or (("value",) if spec.top_k is None else ("value", "top_k"))
    best, size = shape[first:-1].numel(), shape[-1]
    few = best * min(size, TOP_K if spec.top_k is None else spec.top_k)
    whole = {"value": best * size, "id": best, "prob": best, "top_k": few}
    return {field: whole[field] for field in asked}


def _check_packed(
    spec: InferJob, wanted: Sequence[str], steps: Mapping[str, str], findings: Findings
) -> None:
    """Check outputs of packed sequences; ``steps``: the sequence field of each output."""
    if spec.sequence_layout != "packed":
        return
    if not steps.keys() & {*wanted}:
        detail = "none of the outputs has the steps of a sequence: packed changes nothing"
        findings.warn("/sequence_layout", detail, "no_sequence")
    if spec.flatten is not False and len({steps.get(name) for name in wanted}) > 1:
        detail = "packed, the outputs differ in rows: some have one per step, of one field, and"
        findings.problem("/flatten", f"{detail} others have not; set flatten to false", "shape")


def _check_class_axis(spec: InferJob, name: str, shape: torch.Size, findings: Findings) -> None:
    for position, field in enumerate(spec.fields or ("value",)):
        if field != "value":
            detail = f"{name!r} has shape {list(shape)}: without a class axis it has no {field}"
            findings.problem(f"/fields/{position}", detail, "no_class_axis")
    if spec.fields is None and spec.top_k is not None:
        detail = f"{name!r} has shape {list(shape)}: without a class axis it has no top_k"
        findings.problem("/top_k", detail, "no_class_axis")


def _check_top_k(spec: InferJob, name: str, shape: torch.Size, findings: Findings) -> None:
    if spec.top_k is not None and spec.top_k > shape[-1]:
        detail = f"top_k is {spec.top_k}, and the last axis of {name!r} has {shape[-1]} entries:"
        findings.problem("/top_k", f"{detail} set at most {shape[-1]}", "too_large")


def _check_table(
    spec: InferJob, name: str, shape: torch.Size, has_steps: bool, findings: Findings
) -> None:
    """Check that an output fits a file with a cell for each number."""
    if spec.format != "csv":
        return
    if has_steps:
        detail = f"csv has one cell for each number, and {name!r} has a value for each step of a"
        findings.problem("/format", f"{detail} row: set jsonl, parquet or safetensors", "shape")
        return
    width = sum(_widths(spec, shape, 1).values())
    if width > MAX_CSV_COLUMNS:
        detail = f"csv has a column for each number, and {name!r} has {width} for each row, more"
        detail += f" than {MAX_CSV_COLUMNS}: set parquet, jsonl or safetensors"
        findings.problem("/format", detail, "too_large")
