"""Rules over the measurements of a diagnose job, and the verdict in words.

Everything here is a pure function of what was measured. The limits are coarse: they are meant for
what is broken or wrongly configured, not for what could be a little faster.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from engine.diagnose.bandwidth import ALL_REDUCE, SEND_RECV
from engine.diagnose.measuring import Measured
from engine.diagnose.memory import Copy

SLOW_PAIR = 2.0
"""A pair is slow if its messages take longer than this multiple of the median of all pairs."""
SLOW_PART = 0.01
"""Communication is slow if its bus bandwidth is below this part of that of copies in memory."""
_BULK_BYTES = 1 << 20
"""Smaller messages measure latency, not bandwidth."""
_X86 = ("x86_64", "AMD64")
Severity = Literal["info", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule has found."""

    rule: str
    severity: Severity
    summary: str
    """One sentence."""
    evidence: dict[str, Any]
    causes: tuple[tuple[str, str], ...]
    """Codes and texts, the likeliest first."""
    remedies: tuple[str, ...]
    """What to do, the most promising first."""

    def as_dict(self, number: int) -> dict[str, Any]:
        """Return the entry of ``result.findings``."""
        return {
            "id": f"{self.rule}-{number}",
            "rule": self.rule,
            "severity": self.severity,
            "summary": self.summary,
            "evidence": self.evidence,
            "causes": [{"code": code, "text": text} for code, text in self.causes],
            "remedies": [{"text": text, "patch": None} for text in self.remedies],
        }


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that the rules read."""

    device: str
    """The type of the devices."""
    backend: str
    """The backend of torch.distributed for them."""
    has_backend: bool
    processes: Sequence[dict[str, Any]]
    """By rank: ``threads``, ``cores``, ``versions``, …"""
    collectives: Sequence[Measured] = ()
    copies: Sequence[Copy] = ()
    failure: tuple[str, str] | None = None
    """What failed, and the message of the exception."""
    machine: str = field(default_factory=platform.machine)


def findings(seen: Observed) -> list[Finding]:
    """Return the findings, the most severe first."""
    found = [item for rule in _RULES for item in rule(seen)]
    order = ("problem", "warning", "info")
    return sorted(found, key=lambda item: order.index(item.severity))


def verdict(seen: Observed, found: Sequence[Finding]) -> str:
    """Return what was found in one or two sentences, with the likely fix."""
    if found and found[0].severity != "info":
        first = found[0]
        others = sum(item.severity != "info" for item in found) - 1
        more = f" There {'is 1 more finding' if others == 1 else f'are {others} more findings'}."
        return f"{first.summary} {first.remedies[0]}{more if others else ''}"
    num = len(seen.processes)
    if num == 1:
        measured = f"copies in memory run at {_rate(_slowest_copy(seen))}"
        return f"No problem found: {measured}. One process sends nothing: set parallel to test it."
    bulk = _largest(seen, ALL_REDUCE)
    rate = (
        f"an all-reduce of {bulk.size_bytes} bytes runs at {_rate(bulk.bus_bandwidth_bytes_per_s)}"
    )
    return f"No problem found: {num} processes received correct values, and {rate} (bus bandwidth)."


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _largest(seen: Observed, op: str) -> Measured:
    return max(
        (item for item in seen.collectives if item.op == op), key=lambda item: item.size_bytes
    )


def _slowest_copy(seen: Observed) -> float:
    """Return the bandwidth of the slowest copy within the memory of the devices, in bytes/s."""
    within = [one for one in seen.copies if one.source == one.target == seen.device]
    return min(one.bandwidth_bytes_per_s for one in within)


# --- rules ---------------------------------------------------------------------------------------


def _failed(seen: Observed) -> list[Finding]:
    if seen.failure is None:
        return []
    what, message = seen.failure
    return [
        Finding(
            "communication_failed",
            "problem",
            f"The processes could not complete {what}: {message}.",
            {"operation": what, "message": message, "backend": seen.backend},
            (
                ("process_ended", "Another process ended: its log says why."),
                ("backend", f"{seen.backend} does not work with this driver or this network."),
            ),
            (
                "Read the logs of every process (GET /jobs/{id}/logs?rank=1).",
                f"Then compare the versions of the driver and of {seen.backend} with their release"
                " notes, and reinstall what does not match.",
            ),
        )
    ]


def _no_backend(seen: Observed) -> list[Finding]:
    if seen.has_backend or len(seen.processes) == 1:
        return []
    return [
        Finding(
            "backend_unavailable",
            "problem",
            f"This build of torch has no {seen.backend}, which {seen.device} devices need to"
            " communicate.",
            {"backend": seen.backend, "device": seen.device},
            (("build", f"torch was built without {seen.backend}."),),
            (f"Install a build of torch that has {seen.backend}.",),
        )
    ]


def _wrong_values(seen: Observed) -> list[Finding]:
    wrong = [item for item in seen.collectives if item.wrong]
    if not wrong:
        return []
    first = wrong[0]
    ranks = sorted({entry["rank"] for item in wrong for entry in item.wrong})
    where = f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return [
        Finding(
            "wrong_values",
            "problem",
            f"Wrong values arrived in {where}: {first.op} of {first.size_bytes} bytes"
            f"{f' and {len(wrong) - 1} other measurements' if len(wrong) > 1 else ''}.",
            {
                "measurements": [
                    {"op": item.op, "size_bytes": item.size_bytes, "wrong": list(item.wrong)}
                    for item in wrong[:20]
                ],
                "ranks": ranks,
            },
            (
                ("memory", "Memory of the host or of a device changes bits."),
                ("link", f"The link between the devices, or {seen.backend}, corrupts data."),
            ),
            (
                "Do not train on these devices. Repeat the job with other devices to find the one"
                " that all failures share, and have it checked or replaced.",
            ),
        )
    ]


def _wrong_copies(seen: Observed) -> list[Finding]:
    wrong = [copy for copy in seen.copies if not copy.correct]
    if not wrong:
        return []
    first = wrong[0]
    return [
        Finding(
            "wrong_copy",
            "problem",
            f"A copy from {first.source} to {first.target} changed values in process {first.rank}.",
            {"copies": [copy.as_dict() for copy in wrong[:20]]},
            (("memory", "Memory of the host or of a device changes bits."),),
            ("Do not train on this device. Run a memory test, and have the device replaced.",),
        )
    ]


def _versions_differ(seen: Observed) -> list[Finding]:
    first = seen.processes[0]["versions"]
    differs = {
        name: [one["versions"].get(name) for one in seen.processes]
        for name in first
        if any(one["versions"].get(name) != first[name] for one in seen.processes)
    }
    if not differs:
        return []
    return [
        Finding(
            "versions_differ",
            "problem",
            f"The processes have different versions of {', '.join(differs)}.",
            {"versions": differs},
            (("installation", "The processes run in different environments."),),
            ("Install the same versions for all processes.",),
        )
    ]


def _slow_pairs(seen: Observed) -> list[Finding]:
    sent = [item for item in seen.collectives if item.op == SEND_RECV]
    size = max((item.size_bytes for item in sent), default=0)
    sent = [item for item in sent if item.size_bytes == size]
    if len(sent) < 3 or size < _BULK_BYTES:  # two pairs have no majority
        return []
    usual_s = median(item.time_s for item in sent)
    slow = [item for item in sent if item.time_s > SLOW_PAIR * usual_s]
    if not slow:
        return []
    worst = max(slow, key=lambda item: item.time_s)
    first, second = worst.ranks or (0, 0)
    return [
        Finding(
            "slow_pair",
            "warning",
            f"Messages between the processes {first} and {second} take"
            f" {worst.time_s / usual_s:.1f} times as long as between others.",
            {
                "size_bytes": size,
                "median_s": usual_s,
                "pairs": [{"ranks": item.ranks, "time_s": item.time_s} for item in slow[:20]],
            },
            (
                ("topology", "Their devices are connected by a slower link, or share one."),
                ("load", "Another program uses one of their cores or devices."),
            ),
            ("Use devices with the same interconnect (see GET /system), and stop other load.",),
        )
    ]


def _slow_communication(seen: Observed) -> list[Finding]:
    bulk = [
        item
        for item in seen.collectives
        if item.op == ALL_REDUCE and item.size_bytes >= _BULK_BYTES
    ]
    if not bulk or not seen.copies:
        return []
    fastest = max(bulk, key=lambda item: item.bus_bandwidth_bytes_per_s)
    rate, copied = fastest.bus_bandwidth_bytes_per_s, _slowest_copy(seen)
    if rate >= SLOW_PART * copied:
        return []
    return [
        Finding(
            "slow_communication",
            "warning",
            f"An all-reduce runs at {_rate(rate)} (bus bandwidth), and copies in memory at"
            f" {_rate(copied)}.",
            {"bus_bandwidth_bytes_per_s": rate, "copy_bandwidth_bytes_per_s": copied},
            (
                ("transport", f"{seen.backend} uses a slow transport between the devices."),
                ("load", "Other programs use the cores or the links."),
            ),
            (
                "Stop other load and repeat the job. If it stays slow, check the interconnect of"
                " the devices (GET /system).",
            ),
        )
    ]


def _oversubscribed(seen: Observed) -> list[Finding]:
    threads = sum(one["threads"] for one in seen.processes)
    cores = min(one["cores"] for one in seen.processes)
    if threads <= cores:
        return []
    return [
        Finding(
            "cpu_oversubscription",
            "warning",
            f"The processes compute with {threads} threads, and this host lets them use {cores}"
            " cores.",
            {"threads": threads, "cores": cores, "processes": len(seen.processes)},
            (("threads", "The threads of all processes together exceed the cores."),),
            ("Set devices.threads, or GLASSHOUSE_CPU_CORES of the worker, to a smaller number.",),
        )
    ]


def _no_kernels(seen: Observed) -> list[Finding]:
    """Find a torch on x86 CPUs that lacks its fast libraries."""
    versions = seen.processes[0]["versions"]
    if seen.device != "cpu" or seen.machine not in _X86:
        return []
    missing = [name for name in ("mkl", "onednn") if versions.get(name) is None]
    if not missing:
        return []
    named = " and ".join({"mkl": "MKL", "onednn": "oneDNN"}[name] for name in missing)
    return [
        Finding(
            "no_cpu_libraries",
            "warning",
            f"torch was built without {named}, which make it faster on this CPU.",
            {"missing": missing},
            (("build", "This is not one of the official builds of torch."),),
            ("Install the official build of torch from PyPI or pytorch.org.",),
        )
    ]


_RULES: tuple[Callable[[Observed], list[Finding]], ...] = (
    *(_failed, _no_backend, _wrong_values, _wrong_copies, _versions_differ),
    *(_slow_pairs, _slow_communication, _oversubscribed, _no_kernels),
)
