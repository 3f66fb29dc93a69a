"""Generate names for jobs without one: ``mlp-7``, ``infer-digits-2``.

Each owner and stem has a counter, updated in the transaction that stores the job. Concurrent
submissions wait for the counter and never get the same number.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import PurePath
from typing import Any, cast

from sqlalchemy import exists, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from models.tables import Job, NameCounter, core

_MOST = 60
"""Maximum characters before the number."""


def stem_of(spec: Mapping[str, Any], used: Mapping[str, str | None]) -> str:
    """Return the part of a job's name before the number.

    Args:
        spec: The spec of the job, as submitted.
        used: The names of the datasets and checkpoints that it uses, by id.

    Returns:
        For training: the preset, else the name of the uploaded network, else ``train-`` and the
        dataset. For other kinds: the kind and the dataset.
    """
    network: Any = spec.get("network") or {}
    if network.get("type") == "preset":
        return _plain(network["preset"])
    begin: Any = spec.get("init") or {}
    if begin and (uploaded := used.get(begin["checkpoint"])) is not None:
        return _plain(uploaded)
    data: Any = spec.get("data") or {}
    rows: Any = data.get("train", data)
    first = cast("dict[str, Any]", rows[0] if isinstance(rows, list) else rows)
    dataset = used.get(first.get("dataset", ""))
    return _plain(f"{spec['kind']}-{PurePath(dataset).stem}" if dataset else spec["kind"])


def make(tx: Session, owner: str, stem: str) -> str:
    """Return a name that no job of the owner has. Each number is used once."""
    while True:
        number = tx.scalars(_next(tx.get_bind().dialect.name), {"owner": owner, "stem": stem}).one()
        name = f"{stem}-{number}"
        taken = exists().where(Job.owner == owner, Job.name == name)
        if not tx.scalars(select(taken)).one():
            return name


@cache  # building it takes as long as executing it
def _next(dialect: str) -> Any:
    table = core(NameCounter)
    query = (postgresql if dialect == "postgresql" else sqlite).insert(table).values(last=1)
    changed = {"last": table.c.last + 1}
    keys = [column.name for column in table.primary_key.columns]
    return query.on_conflict_do_update(index_elements=keys, set_=changed).returning(table.c.last)


def _plain(text: str) -> str:
    """Return a text with only letters, digits and ``_.-``, limited in length."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")[:_MOST] or "job"
