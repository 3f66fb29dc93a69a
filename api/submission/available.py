"""The devices that a job may get; refuse a job that no worker can run."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from api.app_state import AppState
from glasshouse.errors import DeviceUnavailable, FieldProblem
from glasshouse.spec import AnyJob, Devices
from models.fleet import cores, workers
from models.jobs.needs import GIB, Need, wants
from models.tables import Device, Worker

_PROCESSES = "/parallel/processes"


def find_devices(
    app_state: AppState, spec: AnyJob
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the devices that the job may get, and warnings.

    Raises:
        DeviceUnavailable: The service has workers, but none with a matching healthy device.
    """
    wanted, lease_ms = spec.devices, int(app_state.settings.lease_s * 1000)
    with app_state.database.read() as tx:
        known = workers.all_devices(tx, lease_ms=lease_ms)
        found = workers.all_workers(tx, lease_ms=lease_ms)
        surplus = cores.surplus(cores.flexible_jobs(tx))
    hosts = {row.id: row for row, _ in found}
    states = {row.id: state for row, state in found}
    names = set(hosts)
    if not names:
        return [], [_warning("no worker is there yet: the job waits until one starts")]
    if wanted.worker is not None and wanted.worker not in names:
        detail = f"there is no worker {wanted.worker!r}; there are {_listed(names)}"
        raise _unavailable("/devices/worker", detail)
    if wanted.worker is not None and states[wanted.worker] == "stopped":
        there = _listed({name for name, state in states.items() if state == "active"})
        detail = f"the worker {wanted.worker!r} was stopped; start it again, or leave worker out"
        raise _unavailable("/devices/worker", f"{detail}. Workers that run: {there or 'none'}")
    able = [(row, state) for row, state in known if wanted.worker in (None, row.worker)]
    fitting = [(row, state) for row, state in able if row.healthy and _fits(row, wanted)]
    if not fitting:
        raise _unavailable(*_why_none(wanted, [row for row, _ in able]))
    fitting = _with_memory(wanted, fitting, hosts)
    num_cores = Counter(row.worker for row, _ in able if row.healthy and row.kind == "cpu")
    _check_number(spec, Counter((row.worker, row.kind) for row, _ in fitting), num_cores)
    warnings: list[dict[str, str]] = []
    if all(state != "active" for _, state in fitting):
        warnings.append(_warning("no worker with such a device takes jobs now: the job waits"))
    return [
        _shown(
            row,
            hosts[row.worker],
            free=state == "active" and (row.job is None or (row.worker, row.id) in surplus),
        )
        for row, state in fitting
    ], warnings


def _check_number(
    spec: AnyJob, numbers: Mapping[tuple[str, str], int], num_cores: Mapping[str, int]
) -> None:
    """Check that a worker has enough devices, and cores beside them.

    ``numbers``: the healthy devices that fit, by worker and kind. ``num_cores``: the healthy cores
    of each worker.

    Raises:
        DeviceUnavailable: none has.
    """
    need = Need.of(wants(spec.model_dump(mode="json")), spec.kind)
    able = [
        (kind, num_cores.get(worker, 0))
        for (worker, kind), found in numbers.items()
        if found >= need.count(kind, found, found)
    ]
    if any(found >= need.num_cores(kind, found, found) for kind, found in able):
        return
    if able:  # CUDA devices, and threads for each process
        most = max(found for _, found in able)
        number = need.num_cores("cuda", most, most)
        detail = f"no worker with such devices has {number} CPU cores; the most is {most}: set"
        raise _unavailable("/devices/threads", f"{detail} fewer threads, or leave it out")
    most = max(numbers.values())
    if spec.devices.type == "cpu":
        number = need.count("cpu", most, most)
        detail = f"no worker has {number} CPU cores; the most is {most}"
        several = f"{detail}, and each of {need.processes} processes needs one"
        raise _unavailable(
            *(("/devices/threads", detail) if need.threads else (_PROCESSES, several))
        )
    if need.ids is not None:
        listed = ", ".join(map(str, need.ids))
        raise _unavailable("/devices/ids", f"no worker has all of the devices {listed}")
    detail = f"no worker has {need.num_cuda} healthy devices; the most is {most}"
    raise _unavailable("/devices/count" if spec.devices.count else _PROCESSES, detail)


def _with_memory(
    wanted: Devices, found: list[tuple[Device, str]], hosts: Mapping[str, Worker]
) -> list[tuple[Device, str]]:
    """Return the devices that have the memory that the job asks for.

    Raises:
        DeviceUnavailable: none has it.
    """
    least = wanted.min_memory_gib
    if least is None:
        return found
    sizes = [_memory_of(row, hosts[row.worker]) or 0 for row, _ in found]
    fitting = [one for one, size in zip(found, sizes, strict=True) if size >= int(least * GIB)]
    if not fitting:
        kind = "device" if wanted.type == "auto" else f"{wanted.type} device"
        detail = f"no worker has a {kind} with {least:g} GiB of memory; the most is"
        raise _unavailable(
            "/devices/min_memory_gib", f"{detail} {max(sizes) / GIB:.1f} GiB: ask for less"
        )
    return fitting


def _memory_of(row: Device, host: Worker) -> int | None:
    """Return the memory of a device; of a CPU core, that of its host."""
    return host.info.get("memory_bytes") if row.kind == "cpu" else row.memory_bytes


def _fits(row: Device, wanted: Devices) -> bool:
    if wanted.type == "auto":
        return True
    if row.kind != wanted.type:
        return False
    return wanted.ids is None or row.number in wanted.ids


def _why_none(wanted: Devices, able: list[Device]) -> tuple[str, str]:
    matching = [row for row in able if _fits(row, wanted)]
    if matching:
        row = matching[0]
        return "/devices", f"{row.id} of {row.worker} is not healthy: {row.reason or 'no reason'}"
    there = _listed({f"{row.id} ({row.worker})" for row in able if row.kind != "cpu"})
    pointer = "/devices/ids" if wanted.ids is not None else "/devices"
    ids = f" {', '.join(map(str, wanted.ids))}" if wanted.ids is not None else ""
    return pointer, f"no worker has the {wanted.type} device{ids}; there is {there or 'only CPU'}"


def _unavailable(pointer: str, detail: str) -> DeviceUnavailable:
    problem = FieldProblem(pointer, detail, "device_unavailable")
    return DeviceUnavailable(f"{pointer}: {detail}", problems=[problem])


def _warning(detail: str) -> dict[str, str]:
    return {"pointer": "/devices", "detail": detail, "code": "waits"}


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:20]) + (" …" if len(shown) > 20 else "")


def _shown(row: Device, host: Worker, *, free: bool) -> dict[str, Any]:
    return {
        "worker": row.worker,
        "kind": row.kind,
        "id": row.id,
        "name": row.name,
        "memory_bytes": _memory_of(row, host),
        "host_memory_bytes": host.info.get("memory_bytes"),
        "free": free,
    }
