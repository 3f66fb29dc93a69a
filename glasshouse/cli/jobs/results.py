"""Commands for the results of a job: metrics, layers, inference."""

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from glasshouse.cli.arguments import completion, references
from glasshouse.cli.jobs.job_view import WIDEST_TREND, sparkline
from glasshouse.cli.jobs.jobs import JobId, OnDevice, dataset_of_source
from glasshouse.cli.jobs.watch import detaching
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import Json, figure
from glasshouse.client import Client, Job
from glasshouse.client.data.statistics import LayerStats
from glasshouse.client.data.tables import TABLES, write_table
from glasshouse.client.data.tensors import Array, read_outputs, write_tensors
from glasshouse.client.training.arguments import device_of
from glasshouse.client.training.sources import first_split
from glasshouse.spec.tensor_kinds import LISTED

Save = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Write to .npy, .npz or .safetensors.")
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job or checkpoint: the id or an id prefix, the name, or 'last'; or a model: "
        "mnist, mnist@production, mnist:3.",
        autocompletion=completion.sources,
    ),
]
InferData = Annotated[
    str,
    typer.Option(
        help="A dataset id or name, or a file to upload.",
        autocompletion=completion.datasets,
    ),
]
Split = Annotated[str | None, typer.Option(help="Default: test if it exists, else the first.")]
Outputs = Annotated[str | None, typer.Option(metavar="LAYERS", help="conv1,fc")]
Fields = Annotated[
    str | None,
    typer.Option(help="value, id, prob, top_k. Default: value; with id, prob for a classifier."),
]
TopK = Annotated[
    int | None, typer.Option(min=1, help="Return the K largest entries, with probabilities.")
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Processes that divide the rows. Default: 1.")
]
OnBadRow = Annotated[
    str | None, typer.Option(help="fail, or drop: leave rows that do not fit out, and list them.")
]
WrittenAs = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Let the service write safetensors, npz, jsonl, csv or parquet, and download that file"
        " to --save as it is: for results larger than the memory.",
    ),
]
Timeout = Annotated[float | None, typer.Option(help="Seconds to wait.")]


def metrics(
    job: JobId,
    name: Annotated[
        str | None,
        typer.Argument(
            help="A metric. Default: a table of all.", autocompletion=completion.metrics
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print a table of a job's metrics, or the steps and values of one."""
    with Client() as client:
        job = references.job_id(client, job)
        found = client.jobs.get(job)
        if name is not None:
            series = found.metrics(name)
            steps, values = series.steps.tolist(), series.values.tolist()
            if json:
                output.document({"job": job, "name": name, "step": steps, "values": values})
                return
            for step, value in series:
                output.line(f"{step}\t{value!r}")
            return
        entries = found.metrics()
    if json:
        output.document(list(entries.values()))
        return
    columns = {"last": "last", "min": "min", "max": "max", "count": "count"}
    if any(entry.get("first_nonfinite_step") is not None for entry in entries.values()):
        columns["first_nonfinite_step"] = "first NaN"
    rows = ([key, *(figure(entry.get(c)) for c in columns)] for key, entry in entries.items())
    names = ["name", *columns.values()]
    output.table(names, rows, short={"name"}, numbers=columns.values())


def layers(  # noqa: PLR0913 (each is an option of the command)
    job: JobId,
    layer: Annotated[
        str | None,
        typer.Argument(help="A layer, or conv1.weight.", autocompletion=completion.layers),
    ] = None,
    *,
    kind: Annotated[
        str | None,
        typer.Option(help=f"The kind of captured tensor: {LISTED}. Default: output."),
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="The step of the captured tensor. Default: latest.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0, help="The values of this process alone, which a probe with ranks records."
        ),
    ] = None,
    save: Save = None,
    json: Json = False,
) -> None:
    """Print a job's layers or a layer's statistics; with options, one captured tensor."""
    with Client() as client:
        job = references.job_id(client, job)
        found = client.jobs.get(job)
        if layer is None:
            _print_layers(found.layers.table(rank=rank), as_json=json)
            return
        if kind is step is save is None and (seen := _statistics(found, layer, rank)):
            _print_statistics(seen, as_json=json)
            return
        kind = kind or "output"
        wanted = "latest" if step in (None, "latest") else int(step)
        captured = found.layers[layer].tensor(kind, step=wanted, rank=rank)
    if save is not None:
        _save(save, {f"{layer}/{kind}": captured.values})
    facts = {"job": job, "layer": layer, "kind": kind, "step": captured.step}
    facts |= {} if rank is None else {"rank": rank}
    facts |= _figures(captured.values) | {"saved": None if save is None else str(save)}
    if json:
        output.document(facts)
    else:
        _print_facts(facts)


class Rows(NamedTuple):
    """Rows of a dataset, as options name them."""

    dataset: str
    split: str | None
    on_bad_row: str | None


def run_over_rows(
    client: Client,
    spec: dict[str, Any],
    source: str,
    rows: Rows,
    *,
    timeout_s: float | None,
    shows_progress: bool,
) -> Job:
    """Run a job with a trained network on rows of a dataset, and wait for its end."""
    source = references.trained_id(client, source)
    spec["checkpoint" if source.startswith("ckpt_") else "job"] = source
    dataset = dataset_of_source(client, rows.dataset)
    spec["data"] = {"dataset": dataset.id, "split": rows.split or first_split(dataset, "test")}
    spec["data"] |= {} if rows.on_bad_row is None else {"on_bad_row": rows.on_bad_row}
    job = client.jobs.create(spec)
    with detaching(job.id):
        job.wait(timeout_s, progress=shows_progress)
    return job


def infer(  # noqa: PLR0913 - each is an option of the command
    source: Source,
    *,
    data: InferData,
    split: Split = None,
    outputs: Outputs = None,
    fields: Fields = None,
    top_k: TopK = None,
    on_bad_row: OnBadRow = None,
    device: OnDevice = None,
    processes: Processes = None,
    save: Save = None,
    written_as: WrittenAs = None,
    timeout: Timeout = None,
    json: Json = False,
) -> None:
    """Run a trained network on a dataset and return the outputs of any layers."""
    if written_as is not None and save is None:
        raise typer.BadParameter("--format needs a file: add --save", param_hint="--format")
    spec: dict[str, Any] = {"kind": "infer"}
    given = {"top_k": top_k, "format": written_as, "devices": device and device_of(device)}
    spec |= {name: value for name, value in given.items() if value is not None}
    if fields:
        spec["fields"] = fields.split(",")
    if outputs:
        spec["outputs"] = outputs.split(",")
    if processes is not None and processes > 1:
        spec["parallel"] = {"strategy": "data", "processes": processes}
    with Client() as client:
        rows = Rows(data, split, on_bad_row)
        job = run_over_rows(client, spec, source, rows, timeout_s=timeout, shows_progress=not json)
        if written_as is not None and save is not None:
            job.save_outputs(save)
            _print_saved(job, save, as_json=json)
            return
        content = job.artifact("outputs.safetensors")
    tensors = read_outputs(content)
    if save is not None:
        _save_outputs(save, content, tensors)
    _print_outputs(job.id, tensors, save, as_json=json)


def _print_saved(job: Job, path: Path, *, as_json: bool) -> None:
    """Print where the outputs of an inference are, and for how many rows."""
    progress: dict[str, Any] = job.data["progress"] or {}
    size, rows = path.stat().st_size, progress.get("samples")
    if as_json:
        output.document({"job": job.id, "rows": rows, "size_bytes": size, "saved": str(path)})
        return
    output.line(f"{path}: outputs of {rows} rows, {size} bytes")


def _save_outputs(path: Path, content: bytes, tensors: dict[str, Array]) -> None:
    """Write the outputs of an inference in the format that the suffix of the path names."""
    if path.suffix == ".safetensors":
        path.write_bytes(content)
    elif path.suffix in TABLES:
        write_table(path, dict(sorted(tensors.items())))
    else:
        _save(path, tensors)


def _print_outputs(
    job: str, tensors: dict[str, Array], saved: Path | None, *, as_json: bool
) -> None:
    """Print statistics of each output, and of outputs of class names the rows per class."""
    classes = {name: array for name, array in tensors.items() if name.endswith("/class")}
    counts = {name: _counts(array) for name, array in classes.items()}
    figures = {name: _figures(array) for name, array in tensors.items() if name not in classes}
    if as_json:
        to = None if saved is None else str(saved)
        output.document({"job": job, "outputs": figures, "classes": counts, "saved": to})
        return
    columns = ["shape", "dtype", "mean", "std", "min", "max", "nan", "inf"]
    rows = ([name, *_texts(row).values()] for name, row in figures.items())
    output.table(["output", *columns], rows, short={"output"}, numbers=columns[2:])
    for name, found in counts.items():
        output.line(f"{name}: " + ", ".join(f"{value} {rows}" for value, rows in found.items()))


def _counts(classes: Array) -> dict[str, int]:
    """How many rows have each class, the most frequent first."""
    return dict(Counter(map(str, classes.tolist())).most_common())


def _statistics(job: Job, layer: str, rank: int | None) -> list[LayerStats]:
    """The statistics of a layer and its parameters, thinned to what a line of text can show."""
    parts = (layer, f"{layer}.*")
    return [one for name in parts for one in job.layers[name].all_stats(rank=rank, max_points=400)]


def _print_statistics(seen: list[LayerStats], *, as_json: bool) -> None:
    """Print the newest statistics of each tensor, and in a terminal the trend of its std."""
    columns = ["mean", "std", "min", "max", "l2", "absmax", "zeros", "nan", "inf"]
    newest = [
        {name: float(one[name][-1]) if name in one else None for name in columns} for one in seen
    ]
    if as_json:
        keys = [
            {"layer": one.layer, "kind": one.kind, "phase": one.phase, "step": int(one.steps[-1])}
            | ({} if one.rank is None else {"rank": one.rank})
            for one in seen
        ]
        output.document([key | row for key, row in zip(keys, newest, strict=True)])
        return
    heads = ["tensor", "kind", "phase", "step", *columns]
    rows = [
        [one.layer, one.kind, one.phase, one.steps[-1], *map(figure, row.values())]
        for one, row in zip(seen, newest, strict=True)
    ]
    if sys.stdout.isatty():
        heads.append("std so far")
        for row, one in zip(rows, seen, strict=True):
            row.append(sparkline(one["std"].tolist() if "std" in one else [], WIDEST_TREND))
    output.table(
        heads,
        rows,
        short={"tensor", "std so far"},
        numbers=["step", *columns],
        optional=[
            name
            for name in ("absmax", "zeros", "std so far", "min", "max", "phase")
            if name in heads
        ],
    )


def _print_layers(entries: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        output.document(entries)
        return
    output.table(
        ["name", "type", "output shape", "parameters", "trainable"],
        (
            [
                entry["name"],
                entry.get("type"),
                "x".join(map(str, entry["output_shape"])) if entry.get("output_shape") else None,
                entry.get("parameters"),
                ("yes" if entry.get("trainable") else "no") if entry.get("parameters") else None,
            ]
            for entry in entries
        ),
        short={"name", "type"},
        numbers={"parameters"},
    )


def _print_facts(facts: dict[str, Any]) -> None:
    """Print one fact a line."""
    width = max(map(len, facts))
    for name, text in _texts(facts).items():
        output.line(f"{name:<{width}}  {text}")


def _texts(facts: dict[str, Any]) -> dict[str, str]:
    """Format the values for a terminal."""
    return {
        name: ("x".join(map(str, value)) or "scalar" if name == "shape" else figure(value))
        for name, value in facts.items()
    }


def _figures(array: Array) -> dict[str, Any]:
    """Summary statistics of a tensor; moments over the finite values."""
    numbers = array.astype(np.float64, copy=False)
    finite = numbers[np.isfinite(numbers)]
    figures: dict[str, Any] = {"shape": list(array.shape), "dtype": str(array.dtype)}
    for name in ("mean", "std", "min", "max"):
        figures[name] = float(getattr(finite, name)()) if finite.size else None
    figures["nan"] = int(np.isnan(numbers).sum())
    figures["inf"] = int(np.isinf(numbers).sum())
    return figures


def _save(path: Path, tensors: dict[str, Array]) -> None:
    if path.suffix == ".npy" and len(tensors) == 1:
        np.save(path, next(iter(tensors.values())), allow_pickle=False)
    elif path.suffix == ".npz":
        with path.open("wb") as file:
            np.savez(file, **tensors)  # pyright: ignore[reportArgumentType]
    elif path.suffix == ".safetensors":
        path.write_bytes(write_tensors(tensors))
    else:
        raise ValueError(
            f"cannot save {len(tensors)} tensors to {path.name}: use .npz or .safetensors, "
            "or .npy for one tensor; for outputs of infer, also .csv, .jsonl or .parquet"
        )
