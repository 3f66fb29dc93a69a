"""How much the security tests try, and what comes of it: the figures of docs/concepts/security.md.

``pytest tests/security`` ends with two tables: the sizes of the suites, which are counted from the
suites themselves, and what each file of tests asked and was answered in that run, how long its
longest test took, and by how much an API grew most while one of them ran.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.security import raw

MIB = 2**20
PROPERTY = "security"
FUZZED = "schemathesis"


def sizes() -> dict[str, int]:
    """What there is to be tried, by name."""
    from tests.security import test_files, test_ranges, test_traversal
    from tests.security.populated_api import METHODS, OPEN, all_routes

    routes = all_routes()
    return {
        "operations": len(routes),
        "methods": len(METHODS),
        "open paths": len(OPEN),
        "operations for submit or admin": sum(r.scope in ("submit", "admin") for r in routes),
        "traversals": len(test_traversal.payloads(Path("/tmp/gh"))),  # noqa: S108
        "places of paths": sum(len(route.places) for route in routes),
        "headers": len(test_traversal.HEADERS),
        "queries": len(test_traversal.QUERIES),
        "trap files": len(test_files.CORPUS),
        "kinds of ranges": len(test_ranges.RANGES),
    }


@contextmanager
def counted(found: dict[str, Any]) -> Generator[None]:
    """Fill in what is asked and answered in the block, its seconds, and what an API grows by."""
    answers: Counter[str] = Counter()
    send = httpx2.Client.send

    def sending(client: httpx2.Client, *args: Any, **options: Any) -> httpx2.Response:
        answer = send(client, *args, **options)
        answers[f"{answer.status_code // 100}xx"] += 1
        return answer

    before, began = memory_of_apis(), time.monotonic()
    raw.ANSWERS.clear()
    httpx2.Client.send = sending  # type: ignore[method-assign]
    try:
        yield
    finally:
        httpx2.Client.send = send  # type: ignore[method-assign]
        after = memory_of_apis()
        grown = [size - before[pid] for pid, size in after.items() if pid in before]
        found["seconds"] = time.monotonic() - began
        found["grown_mib"] = max(grown, default=0) / MIB
        found["answers"] = dict(answers + raw.ANSWERS)


def memory_of_apis() -> dict[int, int]:
    """Resident bytes of each API that this process has started."""
    found: dict[int, int] = {}
    for child in psutil.Process(os.getpid()).children():
        try:
            if "api" in child.cmdline():
                found[child.pid] = child.memory_info().rss
        except psutil.Error:
            continue
    return found


def table(reports: Iterable[Any]) -> list[str]:
    """The lines of both tables; none if no security test has run."""
    suites: dict[str, list[dict[str, Any]]] = defaultdict(list)
    fuzzed: list[str] = []
    for report in reports:
        for name, value in report.user_properties:
            if name == PROPERTY:
                suites[Path(report.nodeid.partition("::")[0]).stem].append(value)
            elif name == FUZZED:
                fuzzed.append(f"{name}: {value}")
    if not suites:
        return []
    lines = [f"{count:6} {name}" for name, count in sizes().items()]
    kinds = ("2xx", "3xx", "4xx", "5xx", "raw")
    head = "".join(f"{kind:>8}" for kind in kinds)
    lines += ["", f"{'':16}{'tests':>7}{head}{'longest s':>11}{'growth MiB':>12}"]
    lines += [_row(name, suites[name], kinds) for name in sorted(suites)]
    return [*lines, "", *fuzzed]


def _row(name: str, found: list[dict[str, Any]], kinds: tuple[str, ...]) -> str:
    total: Counter[str] = Counter()
    for one in found:
        total.update(one["answers"])
    counts = "".join(f"{total[kind]:8}" for kind in kinds)
    longest = max(one["seconds"] for one in found)
    grown = max(one["grown_mib"] for one in found)
    return f"{name:16}{len(found):7}{counts}{longest:11.1f}{grown:12.1f}"
