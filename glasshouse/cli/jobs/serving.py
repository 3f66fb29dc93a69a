"""The command that serves published models."""

from typing import Annotated, Any

import typer

from glasshouse.cli.arguments import completion
from glasshouse.cli.jobs.jobs import OnDevice, page_of
from glasshouse.cli.jobs.watch import detaching
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client
from glasshouse.client.training.arguments import device_of
from glasshouse.spec.model_names import parse_model_reference

Models = Annotated[
    list[str],
    completion.named(
        "MODEL…", completion.models, "Published models: mnist, mnist@production, mnist:3."
    ),
]
Shares = Annotated[
    list[str] | None,
    typer.Option(
        "--canary",
        metavar="REF=SHARE",
        help="A version that answers a share of the requests: mnist@candidate=0.05. Repeatable.",
    ),
]
ShadowShares = Annotated[
    list[str] | None,
    typer.Option(
        "--shadow",
        metavar="REF=SHARE",
        help="A version that also computes a share of the requests; differences are counted.",
    ),
]


def serve(  # noqa: PLR0913 - each is an option of the command
    models: Models,
    *,
    name: Annotated[str | None, typer.Option(help="The name of the job.")] = None,
    device: OnDevice = None,
    least: Annotated[
        int | None,
        typer.Option("--min", min=0, help="0: pause the job while no request comes. Default: 1."),
    ] = None,
    most: Annotated[
        int | None, typer.Option("--max", min=1, help="The most replicas. Default: 1.")
    ] = None,
    idle: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="With --min 0, pause after this time. Default: 300."),
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(min=1, help="The most requests that wait. Default: 256.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="The most rows computed at once. Default: 64.")
    ] = None,
    max_delay: Annotated[
        float | None,
        typer.Option(metavar="MS", help="How long a batch waits for more requests. Default: 0."),
    ] = None,
    canary: Shares = None,
    shadow: ShadowShares = None,
    log: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Record this share of the requests; 1: all of them."),
    ] = None,
    redact: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="With --log, never record this field. Repeatable."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job answers requests.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait with --wait. Default: no limit.")
    ] = None,
    json: Json = False,
) -> None:
    """Serve published models until the job is canceled. Prints the id of the job."""
    spec: dict[str, Any] = {"kind": "serve", "models": _entries(models, canary, shadow)}
    replicas = {"min": least, "max": most}
    given = {
        "name": name,
        "devices": device and device_of(device),
        "replicas": {key: value for key, value in replicas.items() if value is not None} or None,
        "idle_s": idle,
        "max_queue": max_queue,
        "max_batch_size": max_batch,
        "max_delay_ms": max_delay,
        "request_log": None if log is None else {"share": log, "redact": redact or []},
    }
    spec |= {key: value for key, value in given.items() if value is not None}
    if timeout is not None and not wait:
        raise typer.BadParameter("it limits --wait, which is missing", param_hint="--timeout")
    if redact and log is None:
        raise typer.BadParameter("it needs --log, which is missing", param_hint="--redact")
    with Client() as client:
        job = client.jobs.create(spec)
        if not json:
            output.line(job.id)
            output.message(f"{job.name}: {page_of(client, job)}")
        if wait:
            with detaching(job.id):
                job.wait_ready(timeout)
        if json:
            output.document(job.data)
        elif wait:
            output.message(f"ready: glasshouse predict {models[0]} …")


def _entries(models: list[str], canary: list[str] | None, shadow: list[str] | None) -> list[Any]:
    """The entries of the spec: a reference alone, or with other versions that get requests."""
    others: dict[str, dict[str, Any]] = {}
    for part, shares in (("canary", canary), ("shadow", shadow)):
        for text in shares or ():
            reference, _, share = text.partition("=")
            entry = others.setdefault(_entry_of(reference, models, text, part), {})
            entry[part] = {"model": reference, "share": _share(share, text, part)}
    return [{"model": one, **others[one]} if one in others else one for one in models]


def _entry_of(reference: str, models: list[str], text: str, part: str) -> str:
    """The served model that another version is of.

    Raises:
        BadParameter: there is none, or there are several.
    """
    wanted, option = parse_model_reference(reference), f"--{part}"
    if wanted is None or "=" not in text:
        detail = f"{text!r} is not of the form mnist@candidate=0.05"
        raise typer.BadParameter(detail, param_hint=option)
    parsed = {one: parse_model_reference(one) for one in models}
    named = [one for one, found in parsed.items() if found and found.name == wanted.name]
    if not named:
        detail = f"{reference} is a version of none of the models: add {wanted.name}"
        raise typer.BadParameter(detail, param_hint=option)
    if len(named) > 1:
        detail = f"{reference} is a version of several of the models ({', '.join(named)})"
        raise typer.BadParameter(f"{detail}: use glasshouse submit", param_hint=option)
    return named[0]


def _share(text: str, whole: str, part: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        detail = f"{whole!r}: the share is a number above 0, at most 1"
        raise typer.BadParameter(detail, param_hint=f"--{part}")
    return share
