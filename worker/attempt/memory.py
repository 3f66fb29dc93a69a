"""Completes an out-of-memory error: measured memory, the plan's estimates, and what to change."""

import contextlib
from pathlib import Path
from typing import Any

from glasshouse.errors import OutOfMemory
from worker.processes.rank import Exit

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""cgroup version 1 reports a number above this if there is no limit."""
_HEADS = {
    "activations_bytes": "activations, which grow with data.batch_size: lower it and raise "
    "accumulate, or have guards.memory.on_oom halve_batch do so",
    "optimizer_state_bytes": "the optimizer's state: choose an optimizer that keeps less, like SGD",
    "parameters_bytes": "the parameters: make the network smaller",
    "averages_bytes": "the averaged weights: leave out average, or take ema instead of window",
    "gradients_bytes": "the gradients: make the network smaller, or train fewer layers",
    "data_bytes": "the dataset itself: train on fewer of its rows, or set data.shuffle.buffer_size",
}


def oom_kills(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return how often the kernel's OOM killer has acted in our cgroup; None if not known.

    Without a cgroup, return the count of the whole machine.
    """
    files = _own_files(proc, cgroup, "memory.events", "memory.oom_control")
    for path in (*files, proc / "vmstat"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in path.read_text().splitlines())["oom_kill"])
    return None


def limit_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return the memory that our cgroup may use, bytes; None if there is no limit."""
    for path in _own_files(proc, cgroup, "memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(path.read_text())
            return limit if limit < _NO_LIMIT else None
    return None


def _own_files(proc: Path, cgroup: Path, *names: str) -> list[Path]:
    """Return where files of our cgroup may be: version 2, or version 1's memory controller.

    A container may see its own cgroup as the root, whatever its path outside is.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = cgroup / controllers
            found += [group / name for group in (root / path.lstrip("/"), root) for name in names]
    return found


def killed_by_kernel(exit_: Exit) -> dict[str, Any]:
    """Return the error of a rank that the OOM killer ended."""
    memory = {"where": "host", "peak_bytes": exit_.peak_bytes, "limit_bytes": limit_bytes()}
    return OutOfMemory(
        "The host's memory ran out: the kernel killed the process.",
        memory={key: value for key, value in memory.items() if value is not None},
        rank=0,
    ).as_dict()


def with_plan_estimates(error: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """Return an out-of-memory error with the plan's estimates, and a hint about the largest."""
    planned: dict[str, int] = plan.get("memory") or {}
    if error.get("category") != "out_of_memory" or not planned:
        return error
    known: dict[str, Any] = error.get("memory") or {}
    memory = {**known, "planned": planned}
    heads = {name: planned[name] for name in _HEADS if planned.get(name)}
    if not heads:
        return {**error, "memory": memory}
    largest = max(heads, key=lambda name: heads[name])
    share = 100 * heads[largest] / max(1, sum(heads.values()))
    hint = f"{share:.0f} % of the memory planned is for {_HEADS[largest]}."
    if largest != "activations_bytes":
        hint += " A lower data.batch_size frees some too."
    return {**error, "memory": memory, "hint": f"{hint} Or choose a device with more memory."}
