"""The command probe."""

from typing import Annotated

import typer

from glasshouse.cli.arguments import references
from glasshouse.cli.jobs.jobs import JobId
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client, Probe
from glasshouse.spec.tensor_kinds import LISTED

Layers = Annotated[
    list[str] | None, typer.Option(help="A glob over layers and parameters; repeatable.")
]
Kinds = Annotated[
    list[str] | None,
    typer.Option(help=f"{LISTED}; comma-separated or repeated."),
]
Every = Annotated[int | None, typer.Option(help="Observe every n-th step. Default: 1.")]
At = Annotated[list[int] | None, typer.Option(help="Observe this step; repeatable.")]
On = Annotated[
    str | None, typer.Option(help="nonfinite: the last 20 steps up to the first NaN or Inf.")
]
Phase = Annotated[str | None, typer.Option(help="train or evaluate. Default: train.")]
MaxOverhead = Annotated[
    float | None,
    typer.Option(help="Maximum fraction of step time; widens the interval. 0: no limit."),
]
Start = Annotated[int | None, typer.Option(help="The first observed step.")]
Stop = Annotated[int | None, typer.Option(help="Observe no steps from this one on.")]
Want = Annotated[
    list[str] | None,
    typer.Option(help="stats, histogram, quantiles, full, sample; comma-separated or repeated."),
]
Slice = Annotated[str | None, typer.Option("--slice", help="The part that full stores: 0:4,:,::2.")]
MaxBytes = Annotated[
    int | None, typer.Option(help="Maximum bytes per tensor that full or sample stores.")
]
Point = Annotated[
    str | None, typer.Option(help="param_grad before or after clipping: raw or clipped.")
]
Lossless = Annotated[
    bool, typer.Option("--lossless", help="Block training rather than drop tensors.")
]
Ranks = Annotated[
    str | None,
    typer.Option(help="Also record the values of single processes: all, or ranks as 0,3."),
]
ListProbes = Annotated[bool, typer.Option("--list", help="List the probes.")]
Remove = Annotated[str | None, typer.Option(metavar="PROBE", help="Remove a probe by id (prb_…).")]


def probe(  # noqa: PLR0913 (each is a field of a probe)
    job: JobId,
    *,
    layers: Layers = None,
    kinds: Kinds = None,
    every: Every = None,
    at: At = None,
    on: On = None,
    phase: Phase = None,
    max_overhead: MaxOverhead = None,
    start: Start = None,
    stop: Stop = None,
    want: Want = None,
    slice_: Slice = None,
    max_bytes: MaxBytes = None,
    point: Point = None,
    lossless: Lossless = False,
    ranks: Ranks = None,
    list_: ListProbes = False,
    remove: Remove = None,
    json: Json = False,
) -> None:
    """Attach, list or remove the probes of a running job."""
    if (bool(layers) + list_ + (remove is not None)) != 1:
        raise typer.BadParameter("pass one of --layers, --list, --remove")
    with Client() as client:
        found = client.jobs.get(references.job_id(client, job))
        if list_:
            _print(found.probes(), as_json=json)
            return
        if remove is not None:
            _print_removed(found.get_probe(remove).remove(), as_json=json)
            return
        attached = found.probe(
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
            ranks=_ranks(ranks),
            **({} if max_overhead is None else {"max_overhead": max_overhead or None}),
        )
    _print_attached(attached, as_json=json)


def _print_removed(probe: Probe, *, as_json: bool) -> None:
    if as_json:
        output.document(probe.data)
    else:
        output.message(f"{probe.id} removed")


def _print_attached(probe: Probe, *, as_json: bool) -> None:
    if as_json:
        output.document(probe.data)
        return
    output.line(probe.id)
    size = output.size(probe.bytes_per_step)
    output.message(f"observes {', '.join(probe.matched)}: {size} per observed step")


def _split(given: list[str] | None) -> list[str]:
    return [name for text in given or () for name in text.split(",") if name]


def _ranks(text: str | None) -> str | list[int] | None:
    """Read ``all``, ``merged`` or ``0,3``."""
    if text is None or text in ("all", "merged"):
        return text
    names = text.split(",")
    if not all(name.isascii() and name.isdecimal() for name in names):
        detail = f"{text!r} is neither all nor a list of ranks such as 0,3"
        raise typer.BadParameter(detail, param_hint="--ranks")
    return [int(name) for name in names]


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
    """The requested and current schedule of a probe."""
    if probe.at:
        return f"at {len(probe.at)} steps"
    requested = probe.every or 1
    text = f"on {probe.on}" if probe.on else f"every {requested}"
    return text if probe.every_now == requested else f"{text}, now every {probe.every_now}"
