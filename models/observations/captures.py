"""Captured tensors: layer, kind and step, and where the bytes are."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from glasshouse.errors import StepNotCaptured
from models.observations import lineage, probes
from models.observations.lineage import AttemptFilter
from models.observations.ranks import MERGED
from models.tables import Capture


def add(tx: Session, job: str, attempt: int, rows: Sequence[dict[str, Any]]) -> None:
    """Store rows of ``id, step, layer, kind, phase, shape, dtype, size_bytes, key``.

    ``rank`` is optional: the process whose tensor it is. ``tensor``, ``form``, ``slice`` and
    ``captured_from`` are optional for a file with one whole tensor.
    """
    if rows:
        tx.execute(insert(Capture), [_row(job, attempt, row) for row in rows])


def _row(job: str, attempt: int, row: dict[str, Any]) -> dict[str, Any]:
    whole = {"tensor": "tensor", "form": "full", "slice": None, "captured_from": row["shape"]}
    whole["rank"] = MERGED
    return {"job": job, "attempt": attempt, **whole, **row}


def find(  # noqa: PLR0913 (each is a filter)
    tx: Session,
    job: str,
    *,
    layer: str | None = None,
    kind: str | None = None,
    phase: str | None = None,
    rank: int | None = MERGED,
    step: int | None = None,
    after: str | None = None,
    limit: int = 100,
    attempt_filter: AttemptFilter = None,
) -> list[Capture]:
    """List captures, oldest first. ``rank`` None: of any process, and of all together."""
    query = select(Capture).where(
        Capture.job == job, *lineage.shown(tx, job, Capture.attempt, Capture.step, attempt_filter)
    )
    if layer is not None:
        query = query.where(Capture.layer == layer)
    if kind is not None:
        query = query.where(Capture.kind == kind)
    if phase is not None:
        query = query.where(Capture.phase == phase)
    if rank is not None:
        query = query.where(Capture.rank == rank)
    if step is not None:
        query = query.where(Capture.step == step)
    if after is not None:
        query = query.where(Capture.id > after)
    return list(tx.scalars(query.order_by(Capture.id).limit(limit)))


def get(  # noqa: PLR0913 (each is a filter)
    tx: Session,
    job: str,
    layer: str,
    kind: str,
    step: int | None,
    *,
    phase: str | None = None,
    rank: int = MERGED,
) -> Capture:
    """Return the capture of a tensor at a step; None means the newest.

    If a step has both phases, training comes before evaluation.

    Raises:
        StepNotCaptured: There is none; the error lists the nearest captured steps.
    """
    mine = (
        Capture.job == job,
        Capture.layer == layer,
        Capture.kind == kind,
        Capture.rank == rank,
        *lineage.shown(tx, job, Capture.attempt, Capture.step),
        *(() if phase is None else (Capture.phase == phase,)),
    )
    # at the same step: training before evaluation, and whole tensors first
    by = (Capture.step.desc(), Capture.phase.desc(), Capture.form != "full", Capture.id.desc())
    query = select(Capture).where(*mine).order_by(*by).limit(1)
    found = tx.scalar(query if step is None else query.where(Capture.step == step))
    if found is not None:
        return found
    steps = list(tx.scalars(select(Capture.step).where(*mine).distinct()))
    near = sorted(sorted(steps, key=lambda captured: abs(captured - (step or 0)))[:10])
    where = f"{layer} {kind}" + ("" if rank == MERGED else f" of rank {rank}")
    if not steps:
        detail, hint = _why_none(tx, job, layer, kind, rank)
        raise StepNotCaptured(detail, hint=hint, nearest_steps=[])
    raise StepNotCaptured(
        f"{where} was not captured at step {step}; the nearest steps are "
        f"{', '.join(map(str, near))}.",
        nearest_steps=near,
    )


def _why_none(tx: Session, job: str, layer: str, kind: str, rank: int) -> tuple[str, str]:
    """Return why there is no capture of a tensor, and what to do about it."""
    watching = [
        row.body
        for row in probes.of_job(tx, job)
        if kind in row.body["kinds"] and _is_matched(layer, row.matched)
    ]
    if not watching:
        probe: dict[str, Any] = {"layers": [layer], "kinds": [kind], "every": 1, "want": ["full"]}
        if rank != MERGED:
            probe["ranks"] = [rank]
        hint = f"Add a probe to the job, in its spec or while it runs: {json.dumps(probe)}"
        return f"No probe watches {layer} {kind}.", hint
    if not any({"full", "sample"} & {*body["want"]} for body in watching):
        detail = f"The probe of {layer} {kind} keeps no tensors."
        return detail, f'It wants {", ".join(watching[0]["want"])}: add "full".'
    if rank != MERGED and not any(_has_rank(body, rank) for body in watching):
        detail = f"The probe of {layer} {kind} keeps the tensors of all processes together, and not"
        return f"{detail} those of rank {rank}.", f'Set its "ranks" to [{rank}] or "all".'
    detail = f"No tensor of {layer} {kind} has been captured."
    return (
        detail,
        "Its probe was due on no step so far, or the tensors were dropped: see its events.",
    )


def _is_matched(layer: str, matched: Sequence[str]) -> bool:
    """Return whether a probe watches a tensor of this name, or its parameter's optimizer state."""
    return any(name == layer or layer.startswith((f"{name}.", f"{name}:")) for name in matched)


def _has_rank(body: Mapping[str, Any], rank: int) -> bool:
    """Return whether a probe keeps the tensors of a process."""
    ranks = body.get("ranks", "merged")
    return ranks == "all" or (ranks != "merged" and rank in ranks)
