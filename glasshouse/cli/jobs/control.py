"""Commands for live control of a job: pause, resume, retry, fork, set."""

from typing import Annotated, Any

import typer

from glasshouse import jsonio
from glasshouse.cli.arguments import overrides, references
from glasshouse.cli.jobs.jobs import JobId, OnDevice, watch_job
from glasshouse.cli.jobs.watch import detaching
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client, Job

Watch = Annotated[bool, typer.Option("--watch", help="Watch the new job until it ends.")]


def pause(job: JobId, json: Json = False) -> None:
    """Pause a job: save a checkpoint and free its devices."""
    with Client() as client:
        _print_state(client.jobs.pause(references.job_id(client, job)), as_json=json)


def resume(job: JobId, json: Json = False) -> None:
    """Resume a paused job from its checkpoint."""
    with Client() as client:
        _print_state(client.jobs.resume(references.job_id(client, job)), as_json=json)


def retry(job: JobId, watch: Watch = False, json: Json = False) -> None:
    """Submit the spec of an ended job as a new job. Prints its id."""
    with Client() as client:
        _print_created(client.jobs.retry(references.job_id(client, job)), watch=watch, as_json=json)


def fork(  # noqa: PLR0913 (each is a field of a fork)
    job: JobId,
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option("-s", "--set", metavar="KEY=VALUE", help="Change the spec by a dotted path."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="The checkpoint id. Default: newest.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="The step of the checkpoint, instead of its id.")
    ] = None,
    load: Annotated[
        str | None, typer.Option(help="all: resume the run. model: load the weights only.")
    ] = None,
    device: OnDevice = None,
    watch: Watch = False,
    json: Json = False,
) -> None:
    """Start a new job from a checkpoint of this one. Prints its id."""
    patch: dict[str, Any] = {}
    for change in set_ or []:
        overrides.apply(patch, change)
    with Client() as client:
        saved = None if checkpoint is None else references.checkpoint_id(client, checkpoint)
        start: dict[str, Any] = {"checkpoint": saved, "step": step, "load": load}
        start["device"] = device
        _print_created(
            client.jobs.fork(references.job_id(client, job), patch, **start),
            watch=watch,
            as_json=json,
        )


def set_(
    job: JobId,
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE…",
            help="Optimizer: lr=0.001, momentum=0.8. Others: grad_clip.max=1, stop.steps=2000.",
        ),
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the change is applied.")] = False,
    json: Json = False,
) -> None:
    """Change settings of a running job, all at the same step."""
    changes = dict(_setting(text) for text in settings)
    with Client() as client:
        job = references.job_id(client, job)
        command = client.jobs.get(job).set(changes)
        if wait:
            with detaching(job):
                command.wait(None)
    if json:
        output.document(command.data)
        return
    output.line(command.id)
    step = "" if command.step is None else f" at step {command.step}"
    output.message(f"{', '.join(f'{name} = {value}' for name, value in changes.items())}:")
    output.message(f"{command.state}{step}")


def _setting(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found or not name:
        raise typer.BadParameter(f"{text!r} is not of the form lr=0.001")
    try:
        read = jsonio.loads(value)
    except ValueError:
        read = value
    return (name if "." in name else f"optimizer.{name}"), read


def _print_state(job: Job, *, as_json: bool) -> None:
    if as_json:
        output.document(job.data)
    else:
        output.message(f"{job.id} is {job.state}")


def _print_created(job: Job, *, watch: bool, as_json: bool) -> None:
    if watch:
        watch_job(job, as_json=as_json)
    elif as_json:
        output.document(job.data)
    else:
        output.line(job.id)
        output.message(f"{job.name}; watch it: glasshouse watch {job.id}")
