"""The command about what is watched of a job: probe."""

from typing import Annotated

import typer

from glasshouse.cli import naming, output
from glasshouse.cli.jobs import JobId
from glasshouse.cli.output import Json
from glasshouse.client import Client, Probe


def probe(  # noqa: PLR0913 (each is a field of a probe)
    job: JobId,
    *,
    layers: Annotated[
        list[str] | None, typer.Option(help="A glob over layers and parameters; may repeat.")
    ] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            help="output, input, output_grad, param, param_grad, update, optim_state; commas, or "
            "may repeat."
        ),
    ] = None,
    every: Annotated[int | None, typer.Option(help="On every n-th step. Left out: 1.")] = None,
    at: Annotated[list[int] | None, typer.Option(help="On this step; may repeat.")] = None,
    on: Annotated[
        str | None, typer.Option(help="nonfinite: the last 20 steps, with the first bad one.")
    ] = None,
    phase: Annotated[
        str | None, typer.Option(help="evaluate: look at evaluations. Left out: train.")
    ] = None,
    max_overhead: Annotated[
        float | None,
        typer.Option(help="Widen the interval beyond this fraction of step time. 0: never."),
    ] = None,
    start: Annotated[int | None, typer.Option(help="Not before this step.")] = None,
    stop: Annotated[int | None, typer.Option(help="No more from this step on.")] = None,
    want: Annotated[
        list[str] | None,
        typer.Option(help="stats, histogram, quantiles, full, sample; commas, or may repeat."),
    ] = None,
    slice_: Annotated[
        str | None, typer.Option("--slice", help="The part that full keeps: 0:4,:,::2.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="What full or sample may keep of one tensor.")
    ] = None,
    point: Annotated[
        str | None, typer.Option(help="Where param_grad is taken: raw, or clipped.")
    ] = None,
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Make training wait for room; drop no tensor.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List what is watched.")] = False,
    remove: Annotated[
        str | None, typer.Option(metavar="PROBE", help="Remove a probe by its id (prb_…).")
    ] = None,
    json: Json = False,
) -> None:
    """Watch more of a running job, list what is watched, or stop watching."""
    if (bool(layers) + list_ + (remove is not None)) != 1:
        raise typer.BadParameter("give one of --layers, --list, --remove")
    with Client() as client:
        found = client.jobs.get(naming.job_id(client, job))
        if list_:
            _print(found.probes(), as_json=json)
            return
        if remove is not None:
            gone = found.get_probe(remove).remove()
            if json:
                output.document(gone.data)
            else:
                output.tell(f"{gone.id} is removed")
            return
        made = found.probe(
            _split(layers),
            _split(kinds) or ["output"],
            want=_split(want) or ["stats"],
            slice=slice_,
            max_bytes=max_bytes,
            every=every,
            at=at or None,
            on=on,
            phase=phase,
            start=start,
            stop=stop,
            point=point,
            lossless=lossless or None,
            **({} if max_overhead is None else {"max_overhead": max_overhead or None}),
        )
    if json:
        output.document(made.data)
        return
    output.line(made.id)
    size = output.size(made.bytes_per_step)
    output.tell(f"it looks at {', '.join(made.matched)}: {size} on a step on which it is due")


def _split(given: list[str] | None) -> list[str]:
    return [name for text in given or () for name in text.split(",") if name]


def _print(found: list[Probe], *, as_json: bool) -> None:
    if as_json:
        output.document([entry.data for entry in found])
        return
    rows = (
        [
            entry.id,
            entry.state,
            ",".join(entry.layers),
            ",".join(entry.kinds),
            _when(entry),
        ]
        for entry in found
    )
    output.table(["id", "state", "layers", "kinds", "when"], rows, short={"layers", "kinds"})


def _when(probe: Probe) -> str:
    """When it looks, as it was asked and as it is."""
    if probe.at:
        return f"at {len(probe.at)} steps"
    asked = probe.every or 1
    text = f"on {probe.on}" if probe.on else f"every {asked}"
    return text if probe.every_now == asked else f"{text}, now every {probe.every_now}"
