"""Commands about checkpoints: those that jobs made, and weights that were sent."""

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli import completing, naming, output
from glasshouse.cli.output import Json
from glasshouse.cli.shown import Command, group
from glasshouse.client import Checkpoint, Client

CheckpointId = Annotated[
    str,
    completing.named("CHECKPOINT", completing.checkpoints),
]


def list_checkpoints(
    of: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="Only those of this job, by step.",
            autocompletion=completing.jobs,
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(help="The same as the argument.", autocompletion=completing.jobs),
    ] = None,
    json: Json = False,
) -> None:
    """List checkpoints, newest first. The state best: of its job, by checkpoint.keep_best."""
    if of is not None and job is not None:
        raise typer.BadParameter("give the job once", param_hint="--job")
    job = of or job
    with Client() as client:
        found = client.checkpoints.list(None if job is None else naming.job_id(client, job))
    if json:
        output.document([item.data for item in found])
        return
    rows = ([item.id, _state(item), item.step, item.job or item.name] for item in found)
    columns = ["id", "state", "step", "job, or name"]
    output.table(columns, rows, short=set() if job else {"job, or name"}, numbers={"step"})


app = group("List, upload, download and delete checkpoints.", list_checkpoints)


def _state(item: Checkpoint) -> str:
    """In a word: the best of a job is complete."""
    return "best" if item.data.get("best") else item.state


@app.command(cls=Command)
def upload(
    file: Annotated[Path, typer.Argument(help="A safetensors file that says its network.")],
    name: Annotated[str | None, typer.Option(help="Left out, the file's name.")] = None,
    json: Json = False,
) -> None:
    """Send weights, streamed. Prints the checkpoint's id."""
    with Client() as client:
        made = client.checkpoints.upload(file, name=name)
    if json:
        output.document(made.data)
    else:
        output.line(made.id)


@app.command(cls=Command)
def download(
    checkpoint: CheckpointId,
    file: Annotated[Path, typer.Argument(help="Where the safetensors file goes.")],
    json: Json = False,
) -> None:
    """Save the weights of a checkpoint."""
    with Client() as client:
        checkpoint = naming.checkpoint_id(client, checkpoint)
        file.write_bytes(client.checkpoints.get(checkpoint).read_weights())
    size = file.stat().st_size
    if json:
        output.document({"id": checkpoint, "file": str(file), "size_bytes": size})
    else:
        output.tell(f"{file}: {size} bytes")


@app.command(cls=Command)
def delete(checkpoint: CheckpointId, json: Json = False) -> None:
    """Delete a checkpoint and its files."""
    with Client() as client:
        checkpoint = naming.checkpoint_id(client, checkpoint)
        client.checkpoints.delete(checkpoint)
    if json:
        output.document({"id": checkpoint, "deleted": True})
    else:
        output.tell(f"{checkpoint} is deleted")
