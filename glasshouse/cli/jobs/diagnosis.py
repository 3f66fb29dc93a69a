"""The result of a diagnose job in a terminal: what was measured, what was found, the verdict."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from glasshouse.cli.terminal import output

_UNITS = ("B", "KiB", "MiB", "GiB")


def lines_of(job: Mapping[str, Any]) -> list[str]:
    """The verdict and the findings of a diagnose job with a result; of others nothing."""
    result: Mapping[str, Any] = job.get("result") or {}
    if job.get("kind") != "diagnose" or "verdict" not in result:
        return []
    told: list[str] = []
    for item in result["findings"]:
        told += [f"{item['severity']}: {item['summary']}", f"  {item['remedies'][0]['text']}"]
    return [*told, result["verdict"]]


def rows_of(job: Mapping[str, Any]) -> tuple[list[str], list[Sequence[str]]]:
    """The columns and rows of its measurements: messages, then copies in memory."""
    result: Mapping[str, Any] = job.get("result") or {}
    columns = ["operation", "processes", "size", "time", "bandwidth", "correct"]
    messages = [
        (item["op"], _ranks(item["ranks"]), *_measured(item))
        for item in result.get("collectives", ())
    ]
    copies = [
        (f"copy {item['from']} to {item['to']}", str(item["rank"]), *_measured(item))
        for item in result.get("memory", {}).get("copies", ())
    ]
    return columns, [*messages, *copies]


def show(job: Mapping[str, Any]) -> None:
    """Print the measurements and what was found, if it is a diagnose job with a result."""
    lines = lines_of(job)
    if lines:
        output.line("")
        columns, rows = rows_of(job)
        output.table(columns, rows, numbers={"size", "time", "bandwidth"})
        for line in lines:
            output.line(line)


def print_to(console: Console, job: Mapping[str, Any]) -> None:
    """Print what was found to a console."""
    for line in lines_of(job):
        console.print(line, markup=False, soft_wrap=True)


def _measured(item: Mapping[str, Any]) -> tuple[str, str, str, str]:
    rate, right = item["bandwidth_bytes_per_s"] / 1e9, "yes" if item["correct"] else "NO"
    return _size(item["size_bytes"]), _time(item["time_s"]), f"{rate:.3g} GB/s", right


def _ranks(ranks: Sequence[int] | None) -> str:
    return "all" if ranks is None else "-".join(map(str, ranks))


def _size(size: float) -> str:
    power = 0
    while size >= 1024 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.4g} {_UNITS[power]}"


def _time(time_s: float) -> str:
    return f"{time_s * 1e6:.0f} µs" if time_s < 1e-3 else f"{time_s * 1e3:.3g} ms"
