"""From what a rank wrote in its spool to what the ledger stores: pure sorting, no I/O but moves.

Bulk files are moved into the artifacts before the transaction that names them, so a row never
names a file that is not there; a file that no row came to name goes with the job's other files.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from glasshouse import jsonio
from glasshouse.events import STATS_COLUMNS, is_upkeep
from glasshouse.ids import new_id
from models.artifacts import Artifacts
from models.attempts import Batch, Claim
from models.events import NewEvent
from models.tables import now

MAX_RESULT_CHARACTERS = 256 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class BadRecord(Exception):
    """A rank wrote something that is no record."""


@dataclass(slots=True)
class Shipment:
    """Records of one run of the spool, ready to be stored together."""

    batch: Batch = field(default_factory=Batch)
    moves: list[tuple[Path, str]] = field(default_factory=list[tuple[Path, str]])
    """Files to bring into the artifacts first: from where, under which key."""
    offsets: tuple[int, int] = (0, 0)
    end: dict[str, Any] | None = None

    def move_files(self, artifacts: Artifacts) -> None:
        """Bring the files in. Can be called again after an error."""
        while self.moves:
            source, key = self.moves[0]
            artifacts.put(key, source)
            del self.moves[0]


class Sorter:
    """Sorts the records of one attempt; remembers the summary and the last step."""

    def __init__(self, claim: Claim, owner: str, job_dir: Path) -> None:
        self._claim = claim
        self._owner = owner
        self._job_dir = job_dir
        self._prefix = f"jobs/{claim.job}/{claim.attempt}"
        self.summary: dict[str, dict[str, Any]] = {}
        self._newest: tuple[int, int] | None = None  # step and epoch of the newest metrics
        self.step: int | None = None
        """The last step that the rank reported."""
        self._by_type = {
            "metrics": self._metrics,
            "progress": self._progress,
            "stats": self._stats,
            "capture": self._capture,
            "checkpoint": self._checkpoint,
            "artifact": self._artifact,
            "result": self._result,
            "dropped": self._dropped,
            "probe": self._probe,
            "end": self._end,
        }

    def sort(self, records: Sequence[dict[str, Any]], offsets: tuple[int, int]) -> Shipment:
        """Make a shipment of records.

        Raises:
            BadRecord: one of them is none.
        """
        shipment = Shipment(offsets=offsets)
        for record in records:
            try:
                self._sort_one(record, shipment)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                shown = jsonio.dumps(record)[:200]
                raise BadRecord(f"{type(error).__name__}: {error} in {shown}") from error
        return shipment

    def add_usage(self, values: dict[str, float], to: Shipment) -> None:
        """Add what the job uses of its machine, as metrics of its newest step, if it has one."""
        if values and self._newest is not None:
            step, epoch = self._newest
            self._metrics({"step": step, "epoch": epoch, "values": values}, now(), to)

    def _sort_one(self, record: dict[str, Any], to: Shipment) -> None:
        at = datetime.fromisoformat(record["at"]).astimezone(UTC)
        rest = {key: value for key, value in record.items() if key not in ("type", "at")}
        sort = self._by_type.get(record["type"])
        if sort is None:
            raise ValueError(f"{record['type']!r} is not a type of record")
        sort(rest, at, to)

    def _progress(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        self.step = record.get("step", self.step)
        to.batch.job["progress"] = record

    def _stats(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        event: dict[str, Any] = {"step": record["step"], "phase": record["phase"]}
        event |= {"columns": list(STATS_COLUMNS), "rows": record["rows"]}
        to.batch.events.append(NewEvent("stats", at, event))
        to.batch.stats.append(record)

    def _result(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        if len(jsonio.dumps(record["result"])) <= MAX_RESULT_CHARACTERS:
            to.batch.job["result"] = record["result"]

    def _dropped(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        to.batch.events.append(NewEvent("dropped", at, record))

    def _probe(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        step = int(record["step"])
        to.batch.probes = (int(record["revision"]), step)
        for change in record["changes"]:
            event = {"probe": change["probe"], "action": change["action"], "step": step}
            to.batch.events.append(NewEvent("probe", at, event))

    def _end(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        to.end = record

    def _metrics(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        batch = to.batch
        step, epoch, values = record["step"], record["epoch"], record["values"]
        self.step = step if self.step is None else max(step, self.step)
        self._newest = (step, epoch)
        batch.events.append(NewEvent("metrics", at, record))
        for name, value in values.items():
            batch.metrics.append({"step": step, "epoch": epoch, "name": name, "value": value})
            if not is_upkeep(name):
                summarize(self.summary, name, jsonio.number(value), step)
        batch.job["summary"] = {name: dict(entry) for name, entry in self.summary.items()}

    def _capture(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        capture = new_id("cap")
        key = f"{self._prefix}/captures/{capture}.safetensors"
        to.moves.append((self._inside(record["file"]), key))
        row = {name: value for name, value in record.items() if name != "file"}
        to.batch.captures.append({"id": capture, "key": key, **row})
        where = f"{quote(row['layer'], safe='')}/{quote(row['kind'], safe='')}"
        href = f"/api/v1/jobs/{self._claim.job}/layers/{where}?step={row['step']}"
        to.batch.events.append(NewEvent("capture", at, {"capture": capture, **row, "href": href}))

    def _checkpoint(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        checkpoint = new_id("ckpt")
        key = f"{self._prefix}/checkpoints/{checkpoint}"
        to.moves.append((self._inside(record["dir"]), key))
        row = {name: value for name, value in record.items() if name != "dir"}
        made = {"id": checkpoint, "owner": self._owner, "key": key, "created_at": now()}
        to.batch.checkpoints.append(row | made)
        event = {name: row[name] for name in ("step", "epoch", "size_bytes", "final")}
        to.batch.events.append(NewEvent("checkpoint", at, {"checkpoint": checkpoint, **event}))

    def _artifact(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        name = record["name"]
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not a name of an artifact")
        key = f"{self._prefix}/artifacts/{name}"
        to.moves.append((self._inside(record["file"]), key))
        row = {part: record[part] for part in ("name", "media_type", "size_bytes")}
        to.batch.artifacts.append({"key": key, **row})

    def _inside(self, relative: str) -> Path:
        parts = PurePosixPath(relative).parts
        if not parts or relative.startswith("/") or ".." in parts:
            raise ValueError(f"{relative!r} is not a path inside the job's directory")
        return self._job_dir.joinpath(*parts)


def summarize(summary: dict[str, dict[str, Any]], name: str, value: float, step: int) -> None:
    """Take one value into the job's summary: last, and the least and greatest finite ones."""
    entry = summary.setdefault(name, {})
    entry["last"] = value
    if not math.isfinite(value):
        return
    if "min" not in entry or value < entry["min"]:
        entry |= {"min": value, "min_step": step}
    if "max" not in entry or value > entry["max"]:
        entry |= {"max": value, "max_step": step}
