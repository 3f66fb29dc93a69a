"""Commands for jobs: submit, watch, show, list, cancel, delete."""

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from glasshouse import jsonio
from glasshouse.cli.arguments import completion, overrides, references
from glasshouse.cli.jobs import diagnosis, evaluation_result, serving_view
from glasshouse.cli.jobs.watch import detaching, follow
from glasshouse.cli.terminal import durations, output
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client, Dataset, Job
from glasshouse.client.training.arguments import device_of, moved
from glasshouse.errors import NotFoundError
from glasshouse.spec.data import BUILTINS, sources_in


def _checked_device(given: str | None) -> str | None:
    try:
        if given is not None:
            device_of(given)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("device: ")) from None
    return given


JobId = Annotated[
    str,
    completion.named("JOB", completion.jobs),
]

OnDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="The device to run on: auto, cpu, cuda, or a specific GPU such as cuda:1.",
        callback=_checked_device,
    ),
]


def submit(
    file: Annotated[str, typer.Argument(help="A job spec in JSON. -: standard input.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("-s", "--set", metavar="KEY=VALUE", help="Change the spec by a dotted path."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="SPLIT=SOURCE",
            help="A file to upload, a dataset id or name, or digits. SPLIT is train, validation or "
            "validation/NAME.",
        ),
    ] = None,
    device: OnDevice = None,
    watch: Annotated[bool, typer.Option("--watch", help="Watch the job until it ends.")] = False,
    json: Json = False,
) -> None:
    """Submit a job. Prints its id."""
    spec = _read_spec(file)
    for change in set_ or []:
        overrides.apply(spec, change)
    if device is not None:
        chosen = moved(spec, device)["devices"]
        spec["devices"] = {name: value for name, value in chosen.items() if value is not None}
    with Client() as client:
        _add_data(client, spec, data or [])
        job = client.jobs.create(spec)
        if watch:
            watch_job(job, as_json=json)
        elif json:
            output.document(job.data)
        else:
            output.line(job.id)
            output.message(f"{job.name}: {page_of(client, job)}")
            output.message(f"watch it: glasshouse watch {job.id}")


def page_of(client: Client, job: Job) -> str:
    """The address of a job's page in the dashboard."""
    return f"{client.url}/jobs/{job.id}"


def watch(job: JobId, json: Json = False) -> None:
    """Watch a job until it ends. Ctrl-C stops watching; the job continues."""
    with Client() as client:
        watch_job(client.jobs.get(references.job_id(client, job)), as_json=json)


def show(job: JobId, json: Json = False) -> None:
    """Show the state, times, devices, metrics and error of a job."""
    with Client() as client:
        found = client.jobs.get(references.job_id(client, job))
        address = page_of(client, found)
    if json:
        output.document(found.data)
        return
    facts: dict[str, Any] = {name: found.data.get(name) for name in _FACTS}
    facts |= {"age": durations.age(found.created_at), "duration": durations.lasted(found.data)}
    facts["steps"] = _steps(found)
    facts["devices"] = ", ".join(f"{one['id']} of {one['worker']}" for one in found.devices)
    facts["labels"] = ", ".join(f"{key}:{value}" for key, value in found.labels.items())
    facts["dashboard"] = address
    output.facts({name: value for name, value in facts.items() if value not in (None, "")})
    summary: dict[str, dict[str, Any]] = found.data.get("summary") or {}
    if summary:
        columns = ["last", "min", "max"]
        rows = (
            [name, *(output.figure(of.get(c)) for c in columns)] for name, of in summary.items()
        )
        output.line("")
        output.table(["metric", *columns], rows, short={"metric"}, numbers=columns)
    diagnosis.show(found.data)
    evaluation_result.show(found.data)
    serving_view.show(found.data)
    if found.error is not None:
        output.message(f"\nfailed: {found.error['message']}")
        if found.error.get("hint"):
            output.message(f"hint: {found.error['hint']}")


_FACTS = (
    *("id", "name", "kind", "state", "state_reason", "created_by", "created_at", "attempt"),
    *("priority", "parent"),
)


def delete(
    jobs: Annotated[
        list[str],
        completion.named("JOB…", completion.jobs, "Ids or id prefixes, names, or 'last'."),
    ],
    json: Json = False,
) -> None:
    """Delete ended jobs with all their metrics, tensors and checkpoints."""
    with Client() as client:
        ids = [references.job_id(client, job) for job in jobs]
        for job in dict.fromkeys(ids):
            client.jobs.delete(job)
            if not json:
                output.message(f"{job} deleted")
    if json:
        output.document([{"id": job, "deleted": True} for job in dict.fromkeys(ids)])


def list_jobs(
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in these states.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="train, infer, evaluate, serve or diagnose.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="KEY:VALUE")] = None,
    search: Annotated[str | None, typer.Option("--search", "-q", help="Part of a name.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of jobs.")] = 20,
    json: Json = False,
) -> None:
    """List jobs, newest first."""
    with Client() as client:
        found = client.jobs.list(
            limit=min(limit, 1000), state=state, kind=kind, label=label, q=search
        )
        jobs = [job for job, _ in zip(found, range(limit), strict=False)]
    if json:
        output.document([job.data for job in jobs])
        return
    output.table(
        ["id", "name", "state", "steps", "age", "duration", "best", "by"],
        map(_row, jobs),
        short={"name", "best", "by"},
        numbers={"age", "duration"},
        optional=("by", "age", "duration"),
    )


def _row(job: Job) -> list[Any]:
    times = [durations.age(job.created_at), durations.lasted(job.data)]
    best = durations.best(job.data.get("summary") or {})
    named = [job.data.get("name"), job.state, _steps(job)]
    return [job.id, *named, *times, best, job.data.get("created_by")]


def cancel(
    job: JobId,
    force: Annotated[bool, typer.Option("--force", help="Kill its processes immediately.")] = False,
    json: Json = False,
) -> None:
    """Cancel a job at its next step boundary."""
    with Client() as client:
        job = references.job_id(client, job)
        answered = client.jobs.cancel(job, force=force)
    if json:
        output.document(answered.data)
    else:
        output.message(f"{job} is {answered.state}")


def watch_job(job: Job, *, as_json: bool) -> None:
    """Follow a job to its end; Ctrl-C detaches."""
    with detaching(job.id):
        follow(job, to_stderr=as_json)
    job.raise_if_unsuccessful()
    if as_json:
        output.document(job.data)


def _read_spec(file: str) -> dict[str, Any]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    try:
        spec = jsonio.loads(text)
    except ValueError as cause:
        raise ValueError(f"{file} is not JSON: {cause}") from cause
    if not isinstance(spec, dict):
        raise ValueError(f"{file} must contain one JSON object, the job spec")
    return cast("dict[str, Any]", spec)


def _add_data(client: Client, spec: dict[str, Any], sources: list[str]) -> None:
    """Put the datasets of ``--data`` into the spec, then resolve all datasets to ids."""
    known: dict[str, Dataset] = {}

    def dataset_of(source: str) -> Dataset:
        if source not in known:
            known[source] = dataset_of_source(client, source)
        return known[source]

    for text in sources:
        part, found, source = text.partition("=")
        if not found or not source or part.endswith("/"):
            raise ValueError(f"--data {text!r} is not of the form train=rows.csv")
        dataset = dataset_of(source)
        first, _, name = part.partition("/")
        split = first if first in dataset.splits else next(iter(dataset.splits), "all")
        data = spec.setdefault("data", {})
        rows = data if spec.get("kind") in ("infer", "evaluate") else data.setdefault(first, {})
        rows = rows.setdefault(name, {}) if name else rows
        rows |= {"dataset": dataset.id, "split": split}
    for rows in sources_in(spec):
        if not rows["dataset"].startswith("ds_"):
            rows["dataset"] = dataset_of(rows["dataset"]).id


def dataset_of_source(client: Client, source: str) -> Dataset:
    """A dataset by its id, its name or ``last``; or of a file that is uploaded.

    Raises:
        ValueError: it is none of these.
    """
    if source.startswith("ds_") or source == references.LAST:
        return client.datasets.get(references.dataset_id(client, source)).wait()
    if Path(source).is_file():
        output.message(f"uploading {source} …")
        dataset = client.datasets.upload(source)
        print_notes(dataset)
        return dataset
    try:
        return client.datasets.named(source)
    except NotFoundError as error:
        detail = f"{source!r} is not a file, a built-in dataset ({', '.join(BUILTINS)}), or the id"
        detail += f" or name of a dataset. {error.problem.get('detail', '')}"
        raise ValueError(detail.strip()) from None


def print_notes(dataset: Dataset) -> None:
    """Print the notes of the reader of an uploaded file."""
    for note in dataset.data.get("notes") or ():
        output.message(f"note: {note['detail']}")


def _steps(job: Job) -> str:
    if "requests" in job.progress:
        return f"{job.progress['requests']} requests"
    done, total = job.progress.get("step"), job.progress.get("num_steps")
    return "-" if done is None else f"{done}/{total}" if total else str(done)
