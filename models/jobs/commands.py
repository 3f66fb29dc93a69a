"""Commands to a running job: change settings (``set``) or do something (``do``).

A command is pending until the rank applies it at a step boundary. Then it is applied, with that
step, or rejected, with the reason. Pending commands of a job that has ended are rejected.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from glasshouse.errors import CommandNotFound, JobEnded
from glasshouse.ids import new_id
from glasshouse.spec.live import overlay
from models.state import ENDED
from models.tables import Command, Job, now

_OURS = ("checkpoint", "evaluate")


@dataclass(frozen=True, slots=True)
class CommandChange:
    """The result of a command."""

    command: str
    values: dict[str, Any]
    """New values of ``state``, ``step``, ``old``, ``new``, ``problem``."""


def add(tx: Session, job: Job, body: Mapping[str, Any], *, by: str) -> Command:
    """Add a command to a job that has not ended. It applies at the next step boundary.

    Raises:
        JobEnded: The job has ended or is being cancelled.
    """
    open_ = Job.state.not_in([*ENDED, "cancelling"])
    number = tx.scalar(
        update(Job)
        .where(Job.id == job.id, open_)
        .values(num_commands=Job.num_commands + 1, version=Job.version + 1)
        .returning(Job.num_commands)
    )
    if number is None:
        state = tx.scalar(select(Job.state).where(Job.id == job.id))
        raise JobEnded(f"The job is {state}: nothing of it can be changed any more.")
    row = Command(
        id=new_id("cmd"),
        job=job.id,
        body=dict(body),
        by=by,
        state="pending",
        created_at=now(),
        number=number,
    )
    tx.add(row)
    tx.flush()
    return row


def get(tx: Session, job: Job, command_id: str) -> Command:
    """Return one command of a job, of any kind.

    Raises:
        CommandNotFound: The job has no command with this id.
    """
    found = tx.get(Command, command_id, populate_existing=True)
    if found is None or found.job != job.id:
        raise CommandNotFound(f"The job has no command {command_id[:64]!r}.")
    return found


def find(
    tx: Session, job_id: str, *, states: Sequence[str] = (), after: str | None, limit: int
) -> list[Command]:
    """List the commands of a job, oldest first."""
    query = select(Command).where(Command.job == job_id).order_by(Command.id).limit(limit)
    if states:
        query = query.where(Command.state.in_(states))
    if after is not None:
        query = query.where(Command.id > after)
    return list(tx.scalars(query))


def orders(rows: Iterable[Command]) -> list[dict[str, Any]]:
    """Return those commands that a rank carries out, in the format for the rank."""
    return [
        {"id": row.id, "by": row.by, **row.body}
        | ({} if row.step is None else {"step": row.step, "old": row.old, "new": row.new})
        for row in sorted(rows, key=lambda row: row.number)
        if is_order(row.body)
    ]


def is_order(body: Mapping[str, Any]) -> bool:
    """Return whether a rank carries out the command, at a step boundary."""
    return "set" in body or body.get("do") in _OURS


def to_carry_out(tx: Session, job_id: str, step: int | None) -> list[dict[str, Any]]:
    """Return the commands for an attempt that starts at a step (None: the first), oldest first.

    First come those that were applied at that step or later: they apply again at their own step,
    because their steps run again. Then come the pending ones.
    """
    query = select(Command).where(Command.job == job_id).order_by(Command.number)
    ours = [row for row in tx.scalars(query) if is_order(row.body)]
    again = [row for row in ours if row.state == "applied" and (row.step or 0) >= (step or 0)]
    return orders(again) + orders([row for row in ours if row.state == "pending"])


def spec_at(tx: Session, job_id: str, resolved: dict[str, Any], step: int | None) -> dict[str, Any]:
    """Return a job's spec just before a step, with all settings changed before it."""
    query = (
        select(Command)
        .where(Command.job == job_id, Command.state == "applied", Command.step < (step or 0))
        .order_by(Command.step, Command.number)
    )
    spec = resolved
    for row in tx.scalars(query):
        if "set" in row.body:
            spec = overlay(spec, row.body["set"])
    return spec


def spec_now(tx: Session, job: Job) -> dict[str, Any]:
    """Return a job's spec with all changes of settings, except rejected ones."""
    query = select(Command).where(Command.job == job.id, Command.state != "rejected")
    spec = job.resolved
    for row in tx.scalars(query.order_by(Command.number)):
        if "set" in row.body:
            spec = overlay(spec, row.body["set"])
    return spec


def note(tx: Session, job_id: str, changes: Sequence[CommandChange]) -> None:
    """Store the results of commands. Unknown commands are ignored."""
    for change in changes:
        tx.execute(
            update(Command)
            .where(Command.job == job_id, Command.id == change.command)
            .values(**change.values)
        )


def reject_pending(tx: Session, job_id: str) -> None:
    """Reject the commands that a job did not apply before its end."""
    problem = {"code": JobEnded().code, "detail": "The job ended before its next step."}
    query = select(Command).where(Command.job == job_id, Command.state == "pending")
    for row in tx.scalars(query):
        if is_order(row.body):
            row.state, row.problem = "rejected", problem
    tx.flush()
