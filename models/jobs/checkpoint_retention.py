"""Decide which checkpoints of a job to keep. Others go once something durable supersedes them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from glasshouse import jsonio
from models.jobs import checkpoints
from models.storage import pending_deletions, references
from models.tables import Checkpoint, Job


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the checkpoints with the best values of a metric."""

    metric: str
    mode: str
    """min or max."""
    count: int = 1

    def of(self, rows: Sequence[Checkpoint]) -> set[str]:
        """Return the ids of the best; a tie goes to the earlier.

        Skips rows without a finite value.
        """
        sign = 1 if self.mode == "min" else -1
        found: list[tuple[float, int, str]] = []
        for row in rows:
            value = row.metrics.get(self.metric)
            number = math.nan if value is None else jsonio.number(value)
            if math.isfinite(number):
                found.append((sign * number, row.step, row.id))
        return {name for _, _, name in sorted(found)[: self.count]}


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """The retention settings in a job's spec."""

    last: int = 3
    best: Best | None = None

    @staticmethod
    def of(spec: Mapping[str, Any]) -> "RetentionRule":
        """Read ``checkpoint`` of a resolved training spec; return the defaults for other specs."""
        said = spec.get("checkpoint") if spec.get("kind") == "train" else None
        if not isinstance(said, Mapping):
            return RetentionRule()
        fields: Mapping[str, Any] = said  # pyright: ignore[reportUnknownVariableType]
        best = fields.get("keep_best")
        return RetentionRule(fields.get("keep_last", 3), None if best is None else Best(**best))


def best(tx: Session, job_ids: Collection[str]) -> dict[str, str]:
    """Return the best checkpoint of each job by its own rule: checkpoint id → reason."""
    found: dict[str, str] = {}
    for job_id, spec in tx.execute(select(Job.id, Job.resolved).where(Job.id.in_(job_ids))):
        rule = RetentionRule.of(spec).best
        if rule is not None:
            rows = [row for row in checkpoints.of_job(tx, job_id) if row.state == "complete"]
            reason = f"{'lowest' if rule.mode == 'min' else 'highest'} {rule.metric}"
            found |= dict.fromkeys(replace(rule, count=1).of(rows), reason)
    return found


def supersede(tx: Session, job_id: str, keeping: RetentionRule) -> list[str]:
    """Delete superseded checkpoints; return the keys of files to delete after the commit.

    Called after the attempt that has the job has stored a checkpoint. It keeps the newest complete
    one and those that another job uses, a model publishes, or that are held for a submission.
    Checkpoints of steps that this attempt runs again, and damaged ones, are deleted only now,
    because before there were no others.
    """
    rows = checkpoints.of_job(tx, job_id)
    complete = [row for row in rows if row.state == "complete"]
    attempt = tx.scalar(select(Job.attempt).where(Job.id == job_id))
    if not any(row.attempt == attempt for row in complete):
        return []
    kept = {row.id for row in complete[-max(1, keeping.last) :]}
    kept |= keeping.best.of(complete) if keeping.best is not None else set()
    every = checkpoints.of_job(tx, job_id, "all")
    superseded = [row.id for row in every if row.id not in kept]
    unused = references.unused(tx, Checkpoint, superseded)
    unused -= checkpoints.held(tx, job_id)  # queried after the rows are locked
    gone = [row for row in every if row.id in unused]
    if gone:
        tx.execute(delete(Checkpoint).where(Checkpoint.id.in_([row.id for row in gone])))
        pending_deletions.add(tx, [row.key for row in gone])
    return [row.key for row in gone]
