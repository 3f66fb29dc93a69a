"""The command that evaluates a trained network, and how its result is printed."""

from pathlib import Path
from typing import Annotated, Any

import typer

from glasshouse import jsonio
from glasshouse.cli.arguments import references
from glasshouse.cli.jobs.jobs import OnDevice, dataset_of_source
from glasshouse.cli.jobs.results import InferData, OnBadRow, Source, Split, Timeout
from glasshouse.cli.jobs.watch import detaching
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import Json, figure
from glasshouse.client import Client
from glasshouse.client.training.arguments import device_of
from glasshouse.client.training.sources import first_split

_SHOWN = 5
_MOST_CLASSES = 20

Want = Annotated[
    str | None,
    typer.Option(
        help="confusion, pr_curve, roc_curve, calibration, worst_samples. Default: what applies."
    ),
]
MetricSpecs = Annotated[
    list[str] | None,
    typer.Option("--metric", metavar="JSON", help="A metric as in a spec. Repeat for several."),
]


def evaluate(  # noqa: PLR0913 - each is an option of the command
    source: Source,
    *,
    data: InferData,
    split: Split = None,
    metric: MetricSpecs = None,
    want: Want = None,
    worst: Annotated[int | None, typer.Option(min=1, help="Worst samples. Default: 20.")] = None,
    by: Annotated[str | None, typer.Option(metavar="COLUMNS", help="label,site")] = None,
    on_bad_row: OnBadRow = None,
    device: OnDevice = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the whole result as JSON.")
    ] = None,
    timeout: Timeout = None,
    json: Json = False,
) -> None:
    """Evaluate a trained network on a dataset: losses, metrics, confusion, worst samples."""
    spec: dict[str, Any] = {"kind": "evaluate"}
    given = {"worst": worst, "devices": device and device_of(device)}
    spec |= {name: value for name, value in given.items() if value is not None}
    if metric:
        spec["metrics"] = [_metric(text) for text in metric]
    if want is not None:
        spec["want"] = [name for name in want.split(",") if name]
    if by:
        spec["by"] = by.split(",")
    with Client() as client:
        source = references.trained_id(client, source)
        spec["checkpoint" if source.startswith("ckpt_") else "job"] = source
        dataset = dataset_of_source(client, data)
        spec["data"] = {"dataset": dataset.id, "split": split or first_split(dataset, "test")}
        spec["data"] |= {} if on_bad_row is None else {"on_bad_row": on_bad_row}
        job = client.jobs.create(spec)
        with detaching(job.id):
            job.wait(timeout, progress=not json)
        content = job.artifact("evaluation.json")
    if save is not None:
        save.write_bytes(content)
    result = jsonio.loads(content)
    if json:
        output.document({"job": job.id, **result})
    else:
        _print(result)


def _metric(text: str) -> Any:
    try:
        return jsonio.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no JSON: {error}", param_hint="--metric") from None


def _print(result: dict[str, Any]) -> None:
    """Print the metrics, and of everything else a summary."""
    output.line(f"{result['rows']} rows, step {result['step']}")
    metrics = {name: jsonio.number(value) for name, value in result["metrics"].items()}
    output.table(
        ["metric", "value"], [[n, figure(v)] for n, v in metrics.items()], short={"metric"}
    )
    for column, found in result.get("by", {}).items():
        _print_values(column, found)
    _print_confusion(result)
    for name, keys in (
        ("pr_curve", ["mean_average_precision"]),
        ("roc_curve", ["mean_auroc"]),
        ("calibration", ["expected_calibration_error", "brier_score"]),
    ):
        found = result.get(name, {})
        for key in (key for key in keys if key in found):
            output.line(f"{key} {figure(jsonio.number(found[key]))}")
    if samples := result.get("worst_samples"):
        names = [name for name in samples[0] if not isinstance(samples[0][name], list)]
        rows = [[_cell(one.get(name, "")) for name in names] for one in samples[:_SHOWN]]
        output.line("")
        output.table([f"worst {names[0]}", *names[1:]], rows, short=set(), numbers=names)


def _print_values(column: str, found: dict[str, dict[str, Any]]) -> None:
    """Print the losses and metrics of each value of a column."""
    names = list(dict.fromkeys(name for own in found.values() for name in own))
    rows = [[key, *(_cell(own.get(name, "")) for name in names)] for key, own in found.items()]
    output.line("")
    output.table([column, *names], rows, short={column}, numbers=names)


def _print_confusion(result: dict[str, Any]) -> None:
    counts = result.get("confusion")
    if counts is None or len(counts) > _MOST_CLASSES:
        return
    names = [str(name) for name in result.get("classes") or range(len(counts))]
    rows = [[name, *map(str, row)] for name, row in zip(names, counts, strict=True)]
    output.line("")
    output.table(["true class", *names], rows, short={"true class"}, numbers=names)


def _cell(value: Any) -> str:
    number = jsonio.number(value)
    return figure(number) if isinstance(number, float) else str(value)
