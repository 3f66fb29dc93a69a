"""Names of jobs that were submitted without one: ``mlp-7``, ``infer-digits-2``.

A counter for each owner and kind of name, in the transaction that stores the job: two submissions
at once wait for each other's counter and never get the same number.
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
"""Characters before the number."""


def stem_of(spec: Mapping[str, Any], used: Mapping[str, str | None]) -> str:
    """What stands before the number in the name of a job.

    Args:
        spec: of the job, as submitted.
        used: the names of the datasets and checkpoints that it uses, by their ids.

    Returns:
        Of training the preset, else the name that the network was uploaded under, else
        ``train-`` and the dataset; of other kinds the kind and the dataset.
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
    """A name that no job of the owner has; its number is given out once."""
    while True:
        number = tx.scalars(_next(tx.get_bind().dialect.name), {"owner": owner, "stem": stem}).one()
        name = f"{stem}-{number}"
        taken = exists().where(Job.owner == owner, Job.name == name)
        if not tx.scalars(select(taken)).one():
            return name


@cache  # making it takes as long as what it does
def _next(dialect: str) -> Any:
    table = core(NameCounter)
    query = (postgresql if dialect == "postgresql" else sqlite).insert(table).values(last=1)
    changed = {"last": table.c.last + 1}
    keys = [column.name for column in table.primary_key.columns]
    return query.on_conflict_do_update(index_elements=keys, set_=changed).returning(table.c.last)


def _plain(text: str) -> str:
    """A text with letters, digits and ``_.-`` only, not too long."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")[:_MOST] or "job"
