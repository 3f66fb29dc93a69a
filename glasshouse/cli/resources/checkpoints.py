"""Commands for checkpoints: those of jobs and uploaded weights."""

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.arguments import completion, references
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.help_text import Command, group
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Checkpoint, Client

CheckpointId = Annotated[
    str,
    completion.named("CHECKPOINT", completion.checkpoints),
]


def list_checkpoints(
    of: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="Only checkpoints of this job, by step.",
            autocompletion=completion.jobs,
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(help="Same as the argument.", autocompletion=completion.jobs),
    ] = None,
    json: Json = False,
) -> None:
    """List checkpoints, newest first. The state best marks the best one by checkpoint.keep_best."""
    if of is not None and job is not None:
        raise typer.BadParameter("pass the job only once", param_hint="--job")
    job = of or job
    with Client() as client:
        found = client.checkpoints.list(None if job is None else references.job_id(client, job))
    if json:
        output.document([item.data for item in found])
        return
    rows = ([item.id, _state(item), item.step, item.job or item.name] for item in found)
    columns = ["id", "state", "step", "job, or name"]
    output.table(columns, rows, short=set() if job else {"job, or name"}, numbers={"step"})


app = group("List, upload, download and delete checkpoints.", list_checkpoints)


def _state(item: Checkpoint) -> str:
    """The state, or ``best`` for the best checkpoint of a job."""
    return "best" if item.data.get("best") else item.state


@app.command(cls=Command)
def upload(
    file: Annotated[
        Path, typer.Argument(help="A safetensors file with the network in its metadata.")
    ],
    name: Annotated[str | None, typer.Option(help="Default: the file name.")] = None,
    json: Json = False,
) -> None:
    """Upload weights. Prints the checkpoint id."""
    with Client() as client:
        made = client.checkpoints.upload(file, name=name)
    if json:
        output.document(made.data)
    else:
        output.line(made.id)


@app.command(cls=Command)
def download(
    checkpoint: CheckpointId,
    file: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    json: Json = False,
) -> None:
    """Download the weights of a checkpoint."""
    with Client() as client:
        checkpoint = references.checkpoint_id(client, checkpoint)
        file.write_bytes(client.checkpoints.get(checkpoint).read_weights())
    size = file.stat().st_size
    if json:
        output.document({"id": checkpoint, "file": str(file), "size_bytes": size})
    else:
        output.message(f"{file}: {size} bytes")


@app.command(cls=Command)
def delete(checkpoint: CheckpointId, json: Json = False) -> None:
    """Delete a checkpoint and its files."""
    with Client() as client:
        checkpoint = references.checkpoint_id(client, checkpoint)
        client.checkpoints.delete(checkpoint)
    if json:
        output.document({"id": checkpoint, "deleted": True})
    else:
        output.message(f"{checkpoint} deleted")
