"""Commands for datasets and devices."""

from pathlib import Path
from typing import Annotated, Any

import typer

from glasshouse.cli.arguments import completion, references
from glasshouse.cli.jobs.jobs import print_notes
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.help_text import Command, group
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client, Dataset
from glasshouse.spec.data import size_of

DatasetId = Annotated[
    str,
    completion.named("DATASET", completion.datasets),
]


def list_datasets(json: Json = False) -> None:
    """List datasets, newest first."""
    with Client() as client:
        found = list(client.datasets.list())
    if json:
        output.document([dataset.data for dataset in found])
        return
    rows = ([one.id, one.state, *_size_of(one), one.data.get("name")] for one in found)
    columns = ["id", "state", "rows", "splits", "name"]
    output.table(columns, rows, short={"splits", "name"}, numbers={"rows"})


app = group("List, upload, show and delete datasets.", list_datasets)


@app.command(cls=Command)
def upload(
    file: Annotated[Path, typer.Argument(help="The file, or 'digits' for the built-in one.")],
    name: Annotated[str | None, typer.Option(help="Default: the file name.")] = None,
    format: Annotated[  # noqa: A002 - the API's word
        str | None,
        typer.Option(
            help="Default: inferred from the file name; `glasshouse datasets formats` lists them.",
            autocompletion=completion.formats,
        ),
    ] = None,
    resize: Annotated[
        str | None, typer.Option(metavar="HxW", help="Resize images to height x width, e.g. 32x32.")
    ] = None,
    header: Annotated[
        bool | None,
        typer.Option(
            "--header/--no-header",
            help="For csv and tsv: whether the first row has column names. Default: detected.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Upload a file and wait until it is ready. Prints the dataset id."""
    with Client() as client:
        if not file.exists() and str(file) in client.info()["capabilities"]["builtin_datasets"]:
            dataset = client.datasets.create(str(file))
        else:
            size = None if resize is None else _size(resize)
            dataset = client.datasets.upload(
                file, name=name, format=format, resize=size, header=header
            )
    if json:
        output.document(dataset.data)
    else:
        output.line(dataset.id)
        output.message(f"{_rows(dataset)} rows")
        print_notes(dataset)


@app.command(cls=Command)
def formats(json: Json = False) -> None:
    """List the file formats and the file name suffixes from which they are inferred."""
    with Client() as client:
        found = [one for one in client.catalog.get("datasets") if one.get("kind") == "format"]
    if json:
        output.document(found)
        return
    rows = ([one["name"], " ".join(one["suffixes"]), one["summary"]] for one in found)
    output.table(["format", "file names", "what it is"], rows, short={"what it is"})


@app.command(cls=Command)
def show(
    dataset: DatasetId,
    rows: Annotated[int, typer.Option(min=0, help="How many rows to show.")] = 3,
    json: Json = False,
) -> None:
    """Show a dataset's columns and splits, and its first rows."""
    with Client() as client:
        found = client.datasets.get(references.dataset_id(client, dataset))
        split = next(iter(found.splits), None)
        first = found.rows(split, limit=rows) if rows and split else []
    if json:
        output.document({**found.data, "rows": first})
        return
    columns = ["column", "dtype", "shape"]
    output.table(columns, ([*_column(one)] for one in found.columns), short={"column"})
    output.message(f"{found.state}; rows: {_rows(found)}")
    print_notes(found)
    for row in first:
        output.line("  ".join(f"{name}={str(value)[:40]}" for name, value in row.items()))


@app.command(cls=Command)
def delete(dataset: DatasetId, json: Json = False) -> None:
    """Delete a dataset and its files."""
    with Client() as client:
        dataset = references.dataset_id(client, dataset)
        client.datasets.delete(dataset)
    if json:
        output.document({"id": dataset, "deleted": True})
    else:
        output.message(f"{dataset} deleted")


def devices(json: Json = False) -> None:
    """List the hardware of all workers."""
    with Client() as client:
        found = [device.data for device in client.devices.list()]
    if json:
        output.document(found)
        return
    columns = {"id": "device", "worker": "worker", "healthy": "healthy", "job": "job"}
    columns |= {"name": "name"}
    rows = ([_cell(device.get(column)) for column in columns] for device in found)
    output.table([*columns.values()], rows, short={"worker", "name"})


def _cell(value: Any) -> Any:
    return ("yes" if value else "no") if isinstance(value, bool) else value


def _size_of(dataset: Dataset) -> tuple[int | None, str]:
    """All its rows, and the names of its splits."""
    splits: dict[str, int] = dataset.data.get("splits") or {}
    return sum(splits.values()) if splits else None, ", ".join(splits) or "-"


def _rows(dataset: Dataset) -> str:
    splits: dict[str, int] = dataset.data.get("splits") or {}
    return ", ".join(f"{name} {count}" for name, count in splits.items()) or "-"


def _size(text: str) -> tuple[int, int]:
    try:
        return size_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--resize") from None


def _column(column: dict[str, Any]) -> list[Any]:
    axes = ("*" if length is None else str(length) for length in column["shape"])
    return [column["name"], column["dtype"], "x".join(axes) or "scalar"]
