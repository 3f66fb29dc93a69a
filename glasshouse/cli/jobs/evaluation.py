"""The command that evaluates a trained network."""

from pathlib import Path
from typing import Annotated, Any

import typer

from glasshouse import jsonio
from glasshouse.cli.jobs import evaluation_result
from glasshouse.cli.jobs.jobs import OnDevice
from glasshouse.cli.jobs.results import (
    InferData,
    OnBadRow,
    Rows,
    Source,
    Split,
    Timeout,
    run_over_rows,
)
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client
from glasshouse.client.training.arguments import device_of

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
        rows = Rows(data, split, on_bad_row)
        job = run_over_rows(client, spec, source, rows, timeout_s=timeout, shows_progress=not json)
        content = job.artifact("evaluation.json")
    if save is not None:
        save.write_bytes(content)
    result = jsonio.loads(content)
    if json:
        output.document({"job": job.id, **result})
    else:
        evaluation_result.print_result(result)


def _metric(text: str) -> Any:
    try:
        return jsonio.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no JSON: {error}", param_hint="--metric") from None
