"""Sorts the records of a rank into the rows that the database stores.

The only I/O: files are moved, and the files of the request log are read.

Files are moved into the artifacts before the transaction that names them, so a row never names a
file that does not exist. `worker.cleanup` deletes files that no row names.
"""

import math
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from glasshouse import jsonio
from glasshouse.events import STATS_COLUMNS, is_upkeep
from glasshouse.failpoints import failpoint
from glasshouse.ids import new_id
from models.jobs.commands import CommandChange
from models.jobs.leases import Claim
from models.jobs.shipments import Batch
from models.observations.events import NewEvent
from models.observations.probes import ProbeChange
from models.storage.artifacts import Artifacts
from models.tables import now
from worker.attempt.captures import BadRecord, CapturedTensors, in_file, new_key
from worker.attempt.nonfinite import Nonfinite
from worker.attempt.request_files import read_requests

MAX_RESULT_CHARACTERS = 256 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(slots=True)
class Shipment:
    """Consecutive records of the spool, ready to be stored together."""

    batch: Batch = field(default_factory=Batch)
    moves: list[tuple[Path, str]] = field(default_factory=list[tuple[Path, str]])
    """Files to move into the artifacts first: source path and key."""
    tensors: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """``captures`` records whose tensors are still in the ring."""
    lots: list[CapturedTensors] = field(default_factory=list[CapturedTensors])
    """Tensors that have left the ring; their rows come first in the batch."""
    read_files: list[Path] = field(default_factory=list[Path])
    """Files of the attempt whose contents are in the batch, to be deleted once it is stored."""
    offsets: tuple[int, int] = (0, 0)
    end: dict[str, Any] | None = None

    def move_files(self, artifacts: Artifacts) -> None:
        """Move the files into the artifacts. Can be called again after an error."""
        while self.moves:
            source, key = self.moves[0]
            failpoint("ship.move")
            artifacts.put(key, source)
            failpoint("ship.moved")
            del self.moves[0]

    def take(self, lots: list[CapturedTensors]) -> None:
        """Add the rows of tensors that have left the ring, before those of the batch's records."""
        rows = sum(len(lot.captures) for lot in self.lots)
        events = sum(len(lot.events) for lot in self.lots)
        self.batch.captures[rows:rows] = [row for lot in lots for row in lot.captures]
        self.batch.events[events:events] = [event for lot in lots for event in lot.events]
        self.lots += lots


class Sorter:
    """Sorts the records of one attempt; keeps the summary and the last step."""

    def __init__(
        self, claim: Claim, owner: str, job_dir: Path, summary: dict[str, Any] | None = None
    ) -> None:
        self._claim = claim
        self._owner = owner
        self._job_dir = job_dir
        self._prefix = f"jobs/{claim.job}/{claim.attempt}"
        self.summary: dict[str, dict[str, Any]] = deepcopy(summary or {})
        """Of all valid steps: it starts with the summary of the steps before this attempt."""
        self.nonfinite = Nonfinite()
        self._newest: tuple[int, int] | None = None  # step and epoch of the newest metrics
        self.step: int | None = None
        """The last step that the rank reported."""
        self._has_found = False
        """Whether a guard has found something in this attempt."""
        self._revision = 0
        """The revision of the list of probes that the rank uses."""
        self._by_type = {
            "metrics": self._metrics,
            "progress": self._progress,
            "stats": self._stats,
            "captures": self._captures,
            "checkpoint": self._checkpoint,
            "artifact": self._artifact,
            "artifacts_removed": self._artifacts_removed,
            "result": self._result,
            "dropped": self._dropped,
            "listening": self._listening,
            "answering": self._answering,
            "serving": self._serving,
            "traffic": self._traffic,
            "drift": self._drift,
            "requests": self._requests,
            "finding": self._finding,
            "probe": self._probe,
            "overhead": self._overhead,
            "adjusted": self._adjusted,
            "command": self._command,
            "end": self._end,
        }

    def sort(self, records: Sequence[dict[str, Any]], offsets: tuple[int, int]) -> Shipment:
        """Make a shipment of records.

        Raises:
            BadRecord: a record is invalid.
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
        """Add what the job uses of its machine as metrics of its newest step, if there is one."""
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
        event |= {key: record[key] for key in ("histograms", "quantiles", "ranks") if key in record}
        to.batch.events.append(NewEvent("stats", at, event, record["step"]))
        to.batch.stats.append(record)
        self.nonfinite.on_stats(record)

    def _result(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        if len(jsonio.dumps(record["result"])) <= MAX_RESULT_CHARACTERS:
            to.batch.job["result"] = record["result"]

    def _dropped(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        newest = None if self._newest is None else self._newest[0]
        to.batch.events.append(NewEvent("dropped", at, record, record.get("step", newest)))

    def _finding(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        if record["rule"] == "drift":
            to.batch.events.append(NewEvent("finding", at, record, announce=True))
            return
        # a guard that lets a job continue may find something in each step
        is_first, self._has_found = not self._has_found, True
        step = int(record["step"])
        to.batch.events.append(NewEvent("finding", at, record, step, announce=is_first))
        self.nonfinite.on_finding(record)

    def _probe(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        step, self._revision = int(record["step"]), int(record["revision"])
        failed = [change for change in record["changes"] if change["action"] == "failed"]
        for change in record["changes"]:
            to.batch.events.append(NewEvent("probe", at, {**change, "step": step}))
        for change in failed:
            values = {"state": "failed", "problem": change["problem"]}
            self._note(to, change["probe"], values)
        if not failed:
            to.batch.probes = (self._revision, step)

    def _overhead(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        parts = ("fraction", "budget", "unbudgeted")
        to.batch.job["probe_overhead"] = {part: record[part] for part in parts}
        for probe, cost_s in record["probes"].items():
            self._note(to, probe, {"cost_s": float(cost_s)})
        for probe, every in record.get("every", {}).items():  # also of earlier attempts
            self._note(to, probe, {"every_now": int(every)})

    def _adjusted(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        to.batch.events.append(NewEvent("adjusted", at, record, record.get("step")))
        if record.get("probe") is not None:
            self._note(to, record["probe"], {"every_now": int(record["to"])})

    def _command(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        values = {name: record.get(name) for name in ("state", "step", "old", "new", "problem")}
        if record["state"] not in ("applied", "rejected"):
            raise ValueError(f"{record['state']!r} is not an end of a command")
        to.batch.commands.append(CommandChange(record["command"], values))
        to.batch.events.append(NewEvent("command", at, record, record["step"]))

    def _note(self, to: Shipment, probe: str, values: dict[str, Any]) -> None:
        to.batch.probe_changes.append(ProbeChange(probe, values, self._revision))

    def _end(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        to.end = record

    def _metrics(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        batch = to.batch
        step, epoch, values = record["step"], record["epoch"], record["values"]
        self.step = step if self.step is None else max(step, self.step)
        self._newest = (step, epoch)
        batch.events.append(NewEvent("metrics", at, record, step))
        for name, value in values.items():
            batch.metrics.append({"step": step, "epoch": epoch, "name": name, "value": value})
            if not is_upkeep(name):
                summarize(self.summary, name, jsonio.number(value), step)
                self.nonfinite.on_metric(step, name, jsonio.number(value))
        batch.job["summary"] = {name: dict(entry) for name, entry in self.summary.items()}

    def _captures(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        whole = {"at": at.isoformat(), **record}
        if "file" not in record:
            to.tensors.append(whole)
            return
        key = new_key(self._claim)
        to.moves.append((self._inside(record["file"]), key))
        lot = in_file(self._claim, whole, key)
        to.batch.captures += lot.captures
        to.batch.events += lot.events

    def _checkpoint(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        checkpoint = new_id("ckpt")
        key = f"{self._prefix}/checkpoints/{checkpoint}"
        to.moves.append((self._inside(record["dir"]), key))
        row = {name: value for name, value in record.items() if name != "dir"}
        made = {"id": checkpoint, "owner": self._owner, "key": key, "created_at": now()}
        to.batch.checkpoints.append(row | made)
        event = {name: row[name] for name in ("step", "epoch", "size_bytes", "final")}
        payload = {"checkpoint": checkpoint, **event}
        # belongs to the step before: an attempt that resumes from it must not hide the event
        to.batch.events.append(NewEvent("checkpoint", at, payload, row["step"] - 1))

    def _artifact(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        name = record["name"]
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not a name of an artifact")
        key = f"{self._prefix}/artifacts/{name}"
        to.moves.append((self._inside(record["file"]), key))
        row = {part: record[part] for part in ("name", "media_type", "size_bytes")}
        to.batch.artifacts.append({"key": key, "step": record.get("step"), **row})

    def _artifacts_removed(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        to.batch.removed_artifacts += [str(name) for name in record["names"]]

    def _listening(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        """Store where a replica listens; its token goes nowhere else."""
        to.batch.replica |= {"address": str(record["address"]), "token": str(record["token"])}

    def _answering(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        """Store where a training job listens; its token goes nowhere else."""
        to.batch.live = {key: str(record[key]) for key in ("address", "token")}
        to.batch.live["problem"] = record.get("problem")

    def _serving(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        to.batch.replica["models"] = record["models"]
        known = ("reference", "model", "version")
        models = [{key: entry[key] for key in known} for entry in record["models"]]
        problem = record.get("problem")
        to.batch.events.append(NewEvent("serving", at, {"models": models, "problem": problem}))

    def _traffic(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        to.batch.replica["traffic"] = record
        to.batch.job["progress"] = {"requests": record["requests"]}

    def _drift(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        to.batch.replica["drift"] = record["versions"]

    def _requests(self, record: dict[str, Any], at: datetime, to: Shipment) -> None:
        """Read requests that a replica recorded; count those of a damaged file as dropped."""
        path = self._inside(record["file"])
        count = int(record["count"])
        try:
            to.batch.requests += read_requests(path, count, int(record["crc32"]))
        except (OSError, ValueError) as error:
            what = f"request log: {error.strerror if isinstance(error, OSError) else error}"
            payload = {"what": what[:500], "count": count}
            to.batch.events.append(NewEvent("dropped", at, payload))
        to.read_files.append(path)

    def _inside(self, relative: str) -> Path:
        parts = PurePosixPath(relative).parts
        if not parts or relative.startswith("/") or ".." in parts:
            raise ValueError(f"{relative!r} is not a path inside the job's directory")
        return self._job_dir.joinpath(*parts)


def summarize(summary: dict[str, dict[str, Any]], name: str, value: float, step: int) -> None:
    """Add one value to the job's summary: the last, and the min and max of the finite values."""
    entry = summary.setdefault(name, {})
    entry["last"] = value
    if not math.isfinite(value):
        entry.setdefault("first_nonfinite_step", step)
        return
    if "min" not in entry or value < entry["min"]:
        entry |= {"min": value, "min_step": step}
    if "max" not in entry or value > entry["max"]:
        entry |= {"max": value, "max_step": step}
