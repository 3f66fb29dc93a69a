"""Convert database rows to public JSON. Only this module knows the public shape of a job."""

from datetime import UTC, datetime
from typing import Any

from api.http.answers import time_text
from glasshouse.metric_direction import direction_of, sources_of
from models.jobs.needs import Need
from models.tables import Command, Dataset, Job, Key, Probe, Replica

BASE = "/api/v1"
_LINKS = (
    "events",
    "stream",
    "metrics",
    "layers",
    "stats",
    "captures",
    "probes",
    "commands",
    "checkpoints",
    "artifacts",
    "logs",
    "spec",
)


def job_json(job: Job, replica: Replica | None) -> dict[str, Any]:
    """Return a job, as in ``GET /jobs/{id}`` and in the stream's ``hello``.

    ``replica``: that of a serve job, if one has ever listened.
    """
    path = f"{BASE}/jobs/{job.id}"
    sources = sources_of(job.summary)
    shown: dict[str, Any] = {
        "id": job.id,
        "object": "job",
        "kind": job.kind,
        "name": job.name,
        "state": job.state,
        "state_reason": job.state_reason,
        "created_at": time_text(job.created_at),
        "created_by": job.created_by,
        "queued_at": time_text(job.queued_at),
        "started_at": time_text(job.started_at),
        "ended_at": time_text(job.ended_at),
        "not_before": not_before(job),
        "paused_at": time_text(job.paused_at),
        "paused_s": job.paused_ms / 1000,
        "attempt": job.attempt,
        "labels": job.labels,
        "priority": job.priority,
        "parent": job.parent,
        "devices": job.devices,
        "ranks": ranks_of(job),
        "progress": job.progress,
        "summary": job.summary,
        "directions": {name: way for name in job.summary if (way := direction_of(name, sources))},
        "probe_overhead": job.probe_overhead,
        "error": job.error,
        "serving": serving_json(job, replica) if job.kind == "serve" else None,
        "last_seq": job.last_seq,
        "warnings": job.warnings,
        "links": {"self": path} | {name: f"{path}/{name}" for name in _LINKS},
    }
    if job.kind != "train":
        shown["result"] = job.result
    return shown


def serving_json(job: Job, replica: Replica | None) -> dict[str, Any]:
    """Return what a serve job serves, and its traffic; never where its replica listens."""
    traffic = {} if replica is None else replica.traffic
    is_listening = (
        replica is not None
        and replica.attempt == job.attempt
        and job.state in {"running", "pausing", "cancelling"}
    )
    return {
        "models": replica.models if replica is not None and is_listening else [],
        "requests": traffic.get("requests", 0),
        "requests_per_s": traffic.get("requests_per_s", 0.0) if is_listening else 0.0,
        "latency_ms": traffic.get("latency_ms"),
        "queue_ms": traffic.get("queue_ms"),
        "waiting": traffic.get("waiting", 0) if is_listening else 0,
        "answered": traffic.get("answered", {}),
        "refused": traffic.get("refused", {}),
        "failed": traffic.get("failed", {}),
        "shadows": traffic.get("shadows", {}),
        "drift": [] if replica is None else replica.drift,
        "request_log": traffic.get("request_log"),
    }


def ranks_of(job: Job) -> list[dict[str, Any]]:
    """Return the processes of a job that has devices, by rank."""
    ids: list[int] = job.wants.get("ids") or []
    order = {number: place for place, number in enumerate(ids)}
    need = Need.of(job.wants, job.kind)
    kinds = [str(one["kind"]) for one in job.devices]
    held = [one for one in job.devices if one["kind"] == "cuda"] or job.devices
    held = sorted(held, key=lambda one: order.get(_number(one["id"]), _number(one["id"])))
    each = len(held) // need.processes
    return [
        {
            "rank": rank,
            "worker": held[rank * each]["worker"],
            "device": held[rank * each]["id"],
            "threads": need.num_threads(kinds),
            "state": job.state,
        }
        for rank in range(need.processes if each else 0)
    ]


def _number(device: str) -> int:
    return int(device.partition(":")[2])


def not_before(job: Job) -> str | None:
    """Return when a queued job that failed through no fault of its own is retried."""
    if job.not_before_ms is None or job.state != "queued":
        return None
    return time_text(datetime.fromtimestamp(job.not_before_ms / 1000, UTC))


def dataset_json(dataset: Dataset) -> dict[str, Any]:
    """Return a dataset."""
    path = f"{BASE}/datasets/{dataset.id}"
    return {
        "id": dataset.id,
        "object": "dataset",
        "name": dataset.name,
        "format": dataset.format,
        "state": dataset.state,
        "problem": dataset.problem,
        "size_bytes": dataset.size_bytes,
        "sha256": dataset.sha256,
        "columns": dataset.columns,
        "splits": dataset.splits,
        "resize": dataset.resize,
        "header": dataset.header,
        "notes": dataset.notes or [],
        "created_at": time_text(dataset.created_at),
        "links": {"self": path, "rows": f"{path}/rows", "stats": f"{path}/stats"},
    }


def key_json(key: Key, secret: str | None = None) -> dict[str, Any]:
    """Return an API key; with its secret only in the response that created it."""
    shown: dict[str, Any] = {
        "id": key.id,
        "object": "key",
        "name": key.name,
        "owner": key.owner,
        "scopes": key.scopes,
        "hint": key.hint,
        "created_at": time_text(key.created_at),
        "revoked_at": time_text(key.revoked_at),
    }
    return shown if secret is None else shown | {"key": secret}


def command_json(command: Command) -> dict[str, Any]:
    """Return a command to a running job."""
    return {
        "id": command.id,
        "object": "command",
        "job": command.job,
        "body": command.body,
        "state": command.state,
        "by": command.by,
        "step": command.step,
        "old": command.old,
        "new": command.new,
        "problem": command.problem,
        "created_at": time_text(command.created_at),
        "links": {"self": f"{BASE}/jobs/{command.job}/commands/{command.id}"},
    }


def probe_json(row: Probe) -> dict[str, Any]:
    """Return a probe of a job, with what it matches and the step from which it applies."""
    path = f"{BASE}/jobs/{row.job}/probes/{row.id}"
    return {
        "id": row.id,
        "object": "probe",
        "job": row.job,
        "state": row.state,
        "point": "raw",  # defaults for probes stored before these fields existed
        "ranks": "merged",
        **row.body,
        "matched": row.matched,
        "bytes_per_step": row.bytes_per_step,
        "estimated_cost_s": row.estimated_cost_s,
        "cost_s": row.cost_s,
        "every_now": row.every_now or row.body.get("every") or (1 if row.body.get("on") else None),
        "applied_step": row.applied_step,
        "position": row.position,
        "problem": row.problem,
        "created_at": time_text(row.created_at),
        "links": {"self": path},
    }
