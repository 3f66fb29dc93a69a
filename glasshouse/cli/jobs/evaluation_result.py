"""The result of an evaluation in a terminal: metrics, confusion matrix, worst samples."""

from collections.abc import Mapping
from typing import Any

from glasshouse import jsonio
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import figure

_SHOWN = 5
_MOST_CLASSES = 20


def show(job: Mapping[str, Any]) -> None:
    """Print the result, if it is an evaluation with a result."""
    if job.get("kind") == "evaluate" and job.get("result"):
        print_result(job["result"])


def print_result(result: dict[str, Any]) -> None:
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
