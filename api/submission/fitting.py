"""Whether a job fits into the memory of devices and hosts; refuse it if it fits nowhere."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from glasshouse.errors import FieldProblem, InvalidSpec
from glasshouse.spec import AnyJob, Devices, DiagnoseJob, TrainJob


def mark_fitting(plan: Mapping[str, Any], devices: list[dict[str, Any]]) -> None:
    """Add to each strategy of a plan whether it ``fits``; None: no memory is known."""
    for one in _strategies(plan):
        processes = plan["parallel"]["processes"]
        sizes = _sizes(devices, one["memory"], processes, one.get("host_bytes"))
        one["fits"] = any(size.is_enough for size in sizes) if sizes else None


def choose_strategy(spec: AnyJob, plan: Mapping[str, Any]) -> str | None:
    """Return what ``auto`` stands for if it is not the strategy of the plan, which is the first."""
    if not isinstance(spec, TrainJob) or spec.parallel.strategy != "auto" or spec.processes == 1:
        return None
    first, *others = _strategies(plan)
    if first["fits"] is not False:
        return None
    able = (one for one in others if not one.get("cpu_offload"))
    return next((one["strategy"] for one in able if one["fits"]), None)


def refuse_too_large(spec: AnyJob, plan: Mapping[str, Any], devices: list[dict[str, Any]]) -> None:
    """Refuse a job that fits on no device: the out-of-memory killer would end it, or worse."""
    pointer, fix = "/network", "make the network or the batch smaller"
    if isinstance(spec, DiagnoseJob):
        pointer, fix = "/sizes_bytes", "send smaller messages, or use fewer processes"
    if parts := _parts(plan):
        _refuse_overfull(parts, spec.devices, devices)
    able = [one for one in _strategies(plan) if one["fits"]]
    for one in [one for one in able if not one.get("cpu_offload")] or able:
        more = ", and parallel.cpu_offload to true" if one.get("cpu_offload") else ""
        fix = f"set parallel.strategy to {one['strategy']}{more}, or {fix}"
    processes = spec.processes
    sizes = _sizes(devices, plan["memory"], processes, _host_bytes(plan))
    if parts:
        on_host = _on_host(plan["memory"], 1, None)
        sizes = [host for one in devices if (host := _host_size(one, on_host))]
    if not sizes or any(size.is_enough for size in sizes):
        return
    largest = max(sizes)
    what = "the largest device that it may get"
    if largest.is_of_host:
        what = "the largest host of such a device"
        pointer, fix = "/data", "take fewer rows"
        fix += ", or use fewer processes" if processes > 1 else ""
        if isinstance(spec, TrainJob) and spec.data.shuffle.buffer_size is None:
            fix = f"set data.shuffle.buffer_size, which keeps rows in files, or {fix}"
        if plan["memory"].get("offloaded_bytes"):
            pointer = "/parallel/cpu_offload"
            fix = f"remove cpu_offload, make the network smaller, or {fix}"
    detail = (
        f"it needs about {largest.needed_bytes / 2**30:.1f} GiB, and {what} has "
        f"{largest.size_bytes / 2**30:.1f} GiB; {fix}"
    )
    problem = FieldProblem(pointer, detail, "too_large")
    raise InvalidSpec(f"{pointer}: {detail}", problems=[problem])


def _strategies(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    parallel: Mapping[str, Any] = plan.get("parallel") or {}
    return parallel.get("strategies", [])


def _parts(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what each device has of a job whose layers are placed."""
    parallel: Mapping[str, Any] = plan.get("parallel") or {}
    return parallel.get("devices", [])


def _refuse_overfull(
    parts: list[dict[str, Any]], wanted: Devices, devices: list[dict[str, Any]]
) -> None:
    """Refuse layers on a device that is too small for them, if its memory is known."""
    for part in parts:
        ids = wanted.ids
        able = devices
        if ids is not None:
            able = [one for one in devices if one["id"] == f"cuda:{ids[part['device']]}"]
        sizes = [one["memory_bytes"] for one in able if one["memory_bytes"] is not None]
        needed = part["memory"]["total_bytes"]
        if sizes and needed > max(sizes):
            pointer = "/network/layers"
            detail = f"the layers on device {part['device']} need about {needed / 2**30:.1f} GiB,"
            detail += f" and the largest device that it may be has {max(sizes) / 2**30:.1f} GiB:"
            detail += " give some of them another device, or make the batch smaller"
            problem = FieldProblem(pointer, detail, "too_large")
            raise InvalidSpec(f"{pointer}: {detail}", problems=[problem])


def _host_bytes(plan: Mapping[str, Any]) -> int | None:
    """Return what several processes need of one host together; None: there is one process."""
    parallel: Mapping[str, Any] = plan.get("parallel") or {}
    return parallel.get("host_bytes")


class _Size(NamedTuple):
    """The memory of a device or of its host, and what is needed of it."""

    size_bytes: int
    needed_bytes: int
    is_of_host: bool = False
    """Whether it is the memory of the host of a CUDA device."""

    @property
    def is_enough(self) -> bool:
        return self.needed_bytes <= self.size_bytes


def _sizes(
    devices: list[dict[str, Any]],
    memory: Mapping[str, int],
    processes: int,
    host_bytes: int | None = None,
) -> list[_Size]:
    """Return the memory of each device, or that of its host if only that is too small.

    Devices whose memory is not known are omitted. On CPU cores all processes share the memory of
    the host. Checkpoints are written from host memory on every device. Rows that take more than a
    quarter of a CUDA device's memory are not moved to it, as in `engine.data.batches.rows`.
    ``memory``: of each process, or of the one that needs the most; ``host_bytes``: of all together,
    if there are several.
    """
    host_only, rows = memory["checkpoint_bytes"], memory.get("data_bytes", 0)
    each = memory["total_bytes"] - host_only - memory.get("offloaded_bytes", 0)
    together = each * processes + host_only if host_bytes is None else host_bytes
    on_host = _on_host(memory, processes, host_bytes)
    found: list[_Size] = []
    for one in devices:
        size, host = one["memory_bytes"], _host_size(one, on_host)
        own = None
        if size is not None:
            on_device = each - rows if rows > size // 4 else each
            own = _Size(size, together if one["kind"] == "cpu" else on_device)
        if host is not None and not host.is_enough and (own is None or own.is_enough):
            own = host
        found += [] if own is None else [own]
    return found


def _on_host(memory: Mapping[str, int], processes: int, host_bytes: int | None) -> int:
    """Return what a job on CUDA devices needs of its host's memory, as of `_sizes`.

    Each process reads its rows into it first, and checkpoints are written from it. Of processes
    that differ, at least that much. What is offloaded counts in ``host_bytes``.
    """
    saved, rows = memory["checkpoint_bytes"], memory.get("data_bytes", 0)
    if host_bytes is not None and "offloaded_bytes" in memory:
        return host_bytes
    if host_bytes is not None:
        saved = max(saved, host_bytes - processes * (memory["total_bytes"] - saved))
    return processes * rows + saved


def _host_size(device: Mapping[str, Any], needed_bytes: int) -> _Size | None:
    """Return the memory of a CUDA device's host; None: it is not known, or a CPU core."""
    size = device["host_memory_bytes"]
    if size is None or device["kind"] == "cpu":
        return None
    return _Size(size, needed_bytes, is_of_host=True)
