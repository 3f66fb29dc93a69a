"""Commands for workers: list, drain, remove; and the hardware and versions of their hosts."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.help_text import Command, group
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client

Name = Annotated[str, typer.Argument(help="The worker's name.")]


def list_workers(json: Json = False) -> None:
    """List workers: active, draining, stopped or lost."""
    with Client() as client:
        rows = [row.data for row in client.workers.list()]
    columns = ["id", "state", "host", "version", "last_seen_at"]
    output.listing(rows, columns, as_json=json, short={"host"})


app = group("Manage the workers that run jobs.", list_workers)


@app.command(cls=Command)
def drain(worker: Name, json: Json = False) -> None:
    """Drain a worker: its running jobs continue, but it accepts no new ones."""
    with Client() as client:
        drained = client.workers.drain(worker).data
    if json:
        output.document(drained)
    else:
        output.message(f"{worker} accepts no new jobs until it is restarted")


@app.command(cls=Command)
def remove(worker: Name, json: Json = False) -> None:
    """Remove a stopped or lost worker and its devices."""
    with Client() as client:
        client.workers.delete(worker)
    if json:
        output.document({"id": worker, "deleted": True})
    else:
        output.message(f"{worker} removed")


def system(json: Json = False) -> None:
    """Show the hardware and the library versions of each worker's host."""
    with Client() as client:
        found = [one.data for one in client.system()]
    if json:
        output.document(found)
        return
    for one in found:
        output.line(f"{one['worker']} ({one['state']}) on {one['host']}, {one['platform'] or '-'}")
        output.table(["", ""], _facts_of(one))


def _facts_of(one: Mapping[str, Any]) -> list[list[str]]:
    """The rows of a host: its processors, memory, versions and accelerators."""
    cpu, memory = one["cpu"], one["memory"]
    nodes = len(cpu["numa_nodes"] or ()) or "-"
    cores = f"{cpu['job_cores'] or '-'} of {cpu['logical_cores'] or '-'} cores for jobs"
    versions = [f"{name} {of}" for name, of in one["versions"].items() if of]
    rows = [
        ["processors", f"{cpu['name'] or '-'}, {cores}, NUMA nodes: {nodes}"],
        ["memory", f"{_gib(memory['available_bytes'])} of {_gib(memory['total_bytes'])} available"],
        *(["versions" if not number else "", name] for number, name in enumerate(versions)),
    ]
    return rows + [[device["id"], _device(device)] for device in one["devices"]]


def _device(device: Mapping[str, Any]) -> str:
    """The facts of an accelerator in a line; only those that are known."""
    link: Mapping[str, Any] = device["interconnect"] or {}
    facts = {
        "compute capability {}": device["compute_capability"],
        "{} used": device["memory_used_bytes"] and _gib(device["memory_used_bytes"]),
        "{:g} % busy": device["utilization_percent"],
        "{:g} °C": device["temperature_celsius"],
        "MIG {}": device["mig"],
        "PCIe {}": link.get("pcie_generation"),
        "{} NVLinks": link.get("nvlinks"),
    }
    known = [text.format(fact) for text, fact in facts.items() if fact is not None]
    return ", ".join([device["name"], _gib(device["memory_bytes"]), *known])


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f} GiB"
