"""What must be true of a job that was killed at random, as anybody can see it over HTTP.

It knows the public API and an undisturbed run of the same spec, and nothing of the service's rooms.
"""

import hashlib
import json
import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import httpx2

TIMED = ("time/", "throughput/", "system/")
"""Series that say how fast it went: no two runs agree on those."""


@dataclass(frozen=True)
class Record:
    """All of a job that two runs of one spec have in common."""

    state: str
    metrics: dict[str, list[tuple[int, Any]]]
    """By name, step and value."""
    log: list[tuple[Any, ...]]
    """The visible events that tell of steps, in order."""
    weights: str
    """The digest of the last checkpoint's tensors."""


def record_of(http: httpx2.Client, job: str) -> Record:
    """Read a job that has ended, checking what must hold of any.

    Raises:
        AssertionError: a promise is broken.
    """
    row = http.get(f"/jobs/{job}").raise_for_status().json()
    assert row["state"] in ("succeeded", "failed", "cancelled"), row
    whole = list(_events(http, job, attempt="all"))
    assert [event["seq"] for event in whole] == list(range(1, len(whole) + 1)), "a gap in the log"
    ends = [event["seq"] for event in whole if event["type"] == "end"]
    assert ends == [len(whole)], f"ends at {ends} of {len(whole)}"
    numbers = [event["n"] for event in whole if event["type"] == "attempt"]
    assert numbers == sorted(set(numbers)), f"attempts {numbers}"
    _check_moves([event for event in whole if event["type"] == "state"])
    shown = list(_events(http, job))
    return Record(row["state"], _metrics(http, job), _log(shown), _weights(http, job))


def _check_moves(moves: list[dict[str, Any]]) -> None:
    state = None
    for move in moves:
        assert move["from"] == state, f"{move} after {state}"
        state = move["to"]


def _events(http: httpx2.Client, job: str, **query: str) -> Generator[dict[str, Any]]:
    after = 0
    while True:
        page = http.get(f"/jobs/{job}/events", params={"after": after, "limit": 1000, **query})
        found = page.raise_for_status().json()
        yield from found["data"]
        if not found["has_more"]:
            return
        after = found["next"]


def _log(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The events about steps. A save is reported when it is durable, so it is listed separately."""
    told: list[tuple[Any, ...]] = []
    saved: list[tuple[Any, ...]] = []
    for event in events:
        if event["type"] == "metrics":
            values = {name: v for name, v in event["values"].items() if not name.startswith(TIMED)}
            if values:
                told.append(("metrics", event["step"], json.dumps(values, sort_keys=True)))
        elif event["type"] == "stats":
            told.append(("stats", event["step"], json.dumps(event["rows"])))
        elif event["type"] == "checkpoint":
            saved.append(("checkpoint", event["step"]))
    return told + sorted(set(saved))


def _metrics(http: httpx2.Client, job: str) -> dict[str, list[tuple[int, Any]]]:
    listed = http.get(f"/jobs/{job}/metrics").raise_for_status().json()["data"]
    names = [item["name"] for item in listed if not item["name"].startswith(TIMED)]
    found: dict[str, list[tuple[int, Any]]] = {}
    for name in names:
        query = {"name": name, "max_points": 10_000}
        answer = http.get(f"/jobs/{job}/metrics/query", params=query).raise_for_status().json()
        series = zip(answer["step"], answer["values"][name], strict=True)
        found[name] = [(step, value) for step, value in series if value is not None]
    return found


def _weights(http: httpx2.Client, job: str) -> str:
    rows = http.get(f"/jobs/{job}/checkpoints").raise_for_status().json()["data"]
    if not rows:
        return "none"
    newest = max(rows, key=lambda row: row["step"])
    blob = http.get(f"/checkpoints/{newest['id']}/weights").raise_for_status().content
    (length,) = struct.unpack("<Q", blob[:8])
    return hashlib.sha256(blob[8 + length :]).hexdigest()
