"""The command compare."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import typer

from glasshouse.cli.arguments import completion, references
from glasshouse.cli.terminal import durations, output
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client, Job
from glasshouse.events import is_upkeep

_MOST = 60
"""The maximum number of characters of a setting's value."""


def compare(
    jobs: Annotated[
        list[str],
        completion.named(
            "JOB JOB…", completion.jobs, "Two or more job ids or id prefixes, names, or 'last'."
        ),
    ],
    json: Json = False,
) -> None:
    """Compare the metrics and differing settings of jobs side by side."""
    if len(jobs) < 2:
        raise typer.BadParameter("pass two or more jobs", param_hint="JOB")
    with Client() as client:
        ids = dict.fromkeys(references.job_id(client, job) for job in jobs)
        found = [client.jobs.get(job) for job in ids]
        specs = [_flat(job.spec()) for job in found]
        address = f"{client.url}/compare?jobs={','.join(ids)}"
    metrics: dict[str, list[dict[str, Any] | None]] = {
        name: [job.summary.get(name) for job in found] for name in _metrics(found)
    }
    settings = _differences(specs)
    if json:
        data = {"jobs": [job.data for job in found], "metrics": metrics, "settings": settings}
        output.document(data)
        return
    heads = [str(job.data.get("name") or job.id) for job in found]
    output.table(["id", "name"], ([job.id, job.data.get("name")] for job in found), short={"name"})
    output.line("")
    rows = [["state", *(job.state for job in found)]]
    rows += [["duration", *(durations.lasted(job.data) for job in found)]]
    for name, of_jobs in metrics.items():
        for word in ("last", "min", "max"):
            rows.append(
                [f"{name} {word}", *(output.figure((one or {}).get(word)) for one in of_jobs)]
            )
    rows += [[name, *map(_shown, values)] for name, values in settings.items()]
    output.table(["", *heads], rows, short={"", *heads})
    output.message(address)


def _metrics(jobs: Sequence[Job]) -> list[str]:
    """The names of the metrics of all jobs, without system metrics."""
    names = dict.fromkeys(name for job in jobs for name in job.summary)
    return [name for name in names if not is_upkeep(name)]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """A spec as settings by dotted path; layers are keyed by name."""
    if isinstance(value, Mapping):
        items = list(cast("Mapping[str, Any]", value).items())
    elif (
        isinstance(value, list) and value and all(_name(item) for item in cast("list[Any]", value))
    ):
        items = [(_name(item), item) for item in cast("list[Any]", value)]
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for name, item in items:
        found |= _flat(item, f"{path}.{name}" if path else str(name))
    return found


def _name(item: Any) -> str | None:
    return cast("Mapping[str, Any]", item).get("name") if isinstance(item, Mapping) else None


def _differences(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for spec in specs for name in spec)
    found = {name: [spec.get(name) for spec in specs] for name in names}
    return {
        name: values
        for name, values in found.items()
        if name != "name" and any(value != values[0] for value in values)
    }


def _shown(value: Any) -> str:
    text = output.figure(value) if isinstance(value, float) else str(value)
    return text if len(text) <= _MOST else text[: _MOST - 1] + "…"
