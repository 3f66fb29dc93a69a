"""The command that sends rows to a served model or a training job."""

import csv
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import typer

from glasshouse import jsonio
from glasshouse.cli.arguments import completion, references
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import Json, figure
from glasshouse.client import Client, JobPrediction
from glasshouse.client.data.predictions import Predicted
from glasshouse.client.data.tensors import read_tensors
from glasshouse.client.training.specs import PredictOptions

MOST_VALUES = 10
"""Longer rows of a value are shown by their shape."""
_ORDER = ("class", "id", "prob", "top_k_class", "top_k", "top_k_prob", "value")
ModelReference = Annotated[
    str,
    completion.named(
        "MODEL",
        completion.predictors,
        "A served model: mnist, mnist@production, mnist:3; or the id of a running training job, "
        "whose current weights predict.",
    ),
]


class _Given(NamedTuple):
    """What the network is to run on."""

    inputs: Any = None
    rows: Any = None


def predict(  # noqa: PLR0913 - each is an option of the command
    model: ModelReference,
    *,
    row: Annotated[
        list[str] | None,
        typer.Option(
            "--row",
            metavar="COLUMN=VALUE",
            help="A value of one row; repeat it for each column. The value is JSON or a text; "
            "@FILE is an image file.",
        ),
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows in a .jsonl or .csv file.")
    ] = None,
    input: Annotated[  # noqa: A002 (the name of the option)
        Path | None,
        typer.Option(
            "--input", metavar="FILE", help="Inputs in a .npy file, or by field in .safetensors."
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A PNG or JPEG file for the network's only input. Repeatable."
        ),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text for the network's only input. Repeatable.")
    ] = None,
    outputs: Annotated[str | None, typer.Option(metavar="LAYERS", help="conv1,fc")] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            help="value, id, prob, top_k. Default: value; with id, prob for a classifier."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Return the K largest entries, with probabilities.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait. Default: that of the service.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a served model, or a training job's network, on rows. Prints a line for each row."""
    ways = {"--row": row, "--rows": rows, "--input": input, "--image": image, "--text": text}
    named = [name for name, value in ways.items() if value]
    if len(named) != 1:
        listed = ", ".join(ways)
        raise typer.BadParameter(
            f"give exactly one of {listed}", param_hint=" ".join(named) or "--row"
        )
    if row:
        given = _Given(rows=[dict(map(_pair, row))])
    elif rows is not None:
        given = _Given(rows=_read_rows(rows))
    elif input is not None:
        given = _Given(inputs=_read_inputs(input))
    else:
        given = _Given(rows=list(image or text or ()))
    options: PredictOptions = {
        "outputs": outputs.split(",") if outputs else None,
        "fields": cast("Any", fields.split(",")) if fields else None,
        "top_k": top_k,
        "timeout": timeout,
    }
    found: Predicted
    with Client() as client:
        if model.startswith("job_"):
            job = client.jobs.get(references.job_id(client, model))
            found = job.predict(given.inputs, rows=given.rows, **options)
        else:
            found = client.predict(model, given.inputs, rows=given.rows, **options)
    if json:
        output.document(found.as_json())
    else:
        _print(found)


def _pair(text: str) -> tuple[str, Any]:
    """Read ``COLUMN=VALUE``; a value is JSON, or else a text, or ``@FILE``."""
    column, equals, value = text.partition("=")
    if not equals or not column:
        raise typer.BadParameter(f"{text!r} is not of the form column=value", param_hint="--row")
    if value.startswith("@"):
        return column, Path(value[1:])
    try:
        return column, jsonio.loads(value)
    except ValueError:
        return column, value


def _read_rows(path: Path) -> list[Any]:
    """Read the rows of a file.

    Raises:
        BadParameter: it has another suffix.
        ValueError: a line is not JSON.
    """
    if path.suffix == ".jsonl":
        return [
            _line(path, number, line)
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if line.strip()
        ]
    if path.suffix != ".csv":
        detail = f"{path} has the suffix {path.suffix!r}: use .jsonl or .csv"
        raise typer.BadParameter(detail, param_hint="--rows")
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: _cell(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return jsonio.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number} is not JSON: {error}") from None


def _cell(text: str | None) -> Any:
    """Read a cell of a csv: a number, a text, or None if it is empty."""
    if not text:
        return None
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _read_inputs(path: Path) -> Any:
    """Read arrays from a file.

    Raises:
        BadParameter: it has another suffix.
    """
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    if path.suffix == ".safetensors":
        return read_tensors(path.read_bytes())
    detail = f"{path} has the suffix {path.suffix!r}: use .npy or .safetensors"
    raise typer.BadParameter(detail, param_hint="--input")


def _print(found: Predicted) -> None:
    """Print a line for each row, and on stderr which version answered, or after which step."""
    names = sorted(found.outputs, key=lambda name: (_rank(name), name))
    columns = [found.outputs[name] for name in names]
    rows = [
        [number, *(_shown(column[number]) for column in columns)]
        for number in range(len(columns[0]) if columns else 0)
    ]
    values = {name for name in names if name.endswith("/value")}
    output.table(["row", *names], rows, short=values, numbers={"row"})
    times = ", ".join(f"{name.removesuffix('_ms')} {ms:g} ms" for name, ms in found.timing.items())
    origin = ":".join(map(str, found.origin.values()))
    if isinstance(found, JobPrediction):
        origin = f"{found.job} step {found.step}"
    output.message(f"{origin}  {times}".rstrip())
    if found.non_finite:
        output.message(f"NaN or Inf in {', '.join(found.non_finite)}")


def _rank(name: str) -> int:
    title = name.rpartition("/")[2]
    return _ORDER.index(title) if title in _ORDER else len(_ORDER)


def _shown(value: Any) -> str:
    """A value of one row: a number, a class, some numbers, or the shape of many."""
    array = np.asarray(value)
    if not array.ndim:
        item = array.item()
        return item if isinstance(item, str) else figure(item)
    if array.ndim == 1 and array.size <= MOST_VALUES:
        return " ".join(_shown(item) for item in array)
    return f"[{', '.join(map(str, array.shape))}]"
