"""Published models: versions of checkpoints under a name, and aliases that name a version.

A published checkpoint is not deleted: `models.storage.references` finds the version. Every change
locks the model's row first and then checkpoints, so two changes never wait for each other.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import delete as sql_delete
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from glasshouse.errors import (
    Conflict,
    FieldProblem,
    InvalidRequest,
    ModelInUse,
    ModelNotFound,
    ModelVersionNotFound,
)
from glasshouse.ids import is_id, new_id
from glasshouse.spec.model_names import LATEST, ModelReference, parse_model_reference
from glasshouse.suggestions import did_you_mean
from models.database import insert_into
from models.jobs import checkpoints
from models.storage import references
from models.tables import Checkpoint, ModelAlias, ModelVersion, PublishedModel, now

MAX_VERSIONS = 1000
"""Versions of one model: one answer lists them all."""
MAX_ALIASES = 100
_MANY = 1000
_LISTED = 10


class PublishedVersion(NamedTuple):
    """A version of a model with its checkpoint."""

    model: PublishedModel
    version: ModelVersion
    checkpoint: Checkpoint
    aliases: tuple[str, ...]
    """Those that name it, by name."""


class Summary(NamedTuple):
    """What a list shows of a model."""

    num_versions: int
    latest: int
    """The number of the newest version."""
    aliases: dict[str, int]


def publish(
    tx: Session,
    *,
    owner: str,
    name: str,
    checkpoint_id: str,
    aliases: Collection[str],
    created_by: str | None = None,
) -> PublishedVersion:
    """Store the next version of an owner's model, or the first version of a new one.

    Aliases that the model already has move to the new version.

    Raises:
        CheckpointNotFound: The checkpoint was deleted in the meantime.
        Conflict: The model has the maximum number of versions.
        InvalidRequest: The checkpoint is damaged, or the model would have too many aliases.
    """
    model = _next(tx, owner, name)
    references.share(tx, [checkpoint_id])
    saved = checkpoints.get(tx, checkpoint_id, None)
    if saved.state != "complete":
        detail = f"the files of {saved.id} are {saved.state}: publish another checkpoint"
        raise _invalid("/checkpoint", detail, "checkpoint_damaged")
    if summaries(tx, [model.id])[model.id].num_versions >= MAX_VERSIONS:
        detail = f"The model {name!r} has {MAX_VERSIONS} versions, which is the maximum"
        raise Conflict(f"{detail}: delete old ones first.")
    version = ModelVersion(
        model=model.id,
        number=model.last_version,
        checkpoint=saved.id,
        created_at=model.updated_at,
        created_by=created_by,
    )
    tx.add(version)
    tx.flush()
    _move(tx, model, dict.fromkeys(aliases, version.number))
    return PublishedVersion(model, version, saved, tuple(sorted(set(aliases))))


def _next(tx: Session, owner: str, name: str) -> PublishedModel:
    """Count one more version of a model, which is created if needed, and lock its row.

    One statement, so that concurrent publications get different numbers.
    """
    time = now()
    row = {"id": new_id("mdl"), "owner": owner, "name": name, "last_version": 1, "revision": 1}
    query = insert_into(tx, PublishedModel).values(**row, created_at=time, updated_at=time)
    changed = {
        "last_version": PublishedModel.last_version + 1,
        "revision": PublishedModel.revision + 1,
        "updated_at": time,
    }
    query = query.on_conflict_do_update(index_elements=["owner", "name"], set_=changed)
    model_id = tx.scalars(query.returning(PublishedModel.id)).one()
    return tx.get_one(PublishedModel, model_id, populate_existing=True)


def get(
    tx: Session, reference: str, *, owner: str, sees: str | None, lock: bool = False
) -> PublishedModel:
    """Return the model that a name or an id refers to.

    A name refers to the owner's own model, or else to a visible one of another owner.

    Args:
        tx: The transaction.
        reference: A name or an id.
        owner: The caller's owner.
        sees: The owner whose models are visible; None: those of all owners.
        lock: Lock the row until the transaction ends.

    Raises:
        ModelNotFound: There is none, or several other owners have one of this name.
    """
    which = PublishedModel.id if is_id(reference, "mdl") else PublishedModel.name
    query = select(PublishedModel).where(which == reference).order_by(PublishedModel.id)
    if sees is not None:
        query = query.where(PublishedModel.owner == sees)
    if lock:
        query = query.with_for_update().execution_options(populate_existing=True)
    rows = list(tx.scalars(query.limit(_MANY)))
    rows = [row for row in rows if row.owner == owner] or rows
    if not rows:
        known = select(PublishedModel.name).where(PublishedModel.owner == owner).limit(_MANY)
        near = did_you_mean(reference, tx.scalars(known))
        raise ModelNotFound(f"No model has the name {reference[:100]!r}{near or '.'}")
    if len(rows) > 1:
        listed = ", ".join(row.id for row in rows[:_LISTED])
        detail = f"Several owners have a model {reference[:100]!r}: give the id of one"
        raise ModelNotFound(f"{detail} ({listed}).")
    return rows[0]


def find(tx: Session, *, owner: str | None, after: str | None, limit: int) -> list[PublishedModel]:
    """List models, newest first. ``owner`` None sees those of all owners."""
    query = select(PublishedModel).order_by(PublishedModel.id.desc()).limit(limit)
    if owner is not None:
        query = query.where(PublishedModel.owner == owner)
    if after is not None:
        query = query.where(PublishedModel.id < after)
    return list(tx.scalars(query))


def summaries(tx: Session, model_ids: Collection[str]) -> dict[str, Summary]:
    """Return what a list shows of models, by id."""
    count, latest = func.count(ModelVersion.number), func.max(ModelVersion.number)
    query = select(ModelVersion.model, count, latest).where(ModelVersion.model.in_(model_ids))
    found = {model: Summary(0, 0, {}) for model in model_ids}
    for model, num_versions, number in tx.execute(query.group_by(ModelVersion.model)):
        found[model] = Summary(num_versions, number, {})
    named = select(ModelAlias).where(ModelAlias.model.in_(model_ids)).order_by(ModelAlias.name)
    for alias in tx.scalars(named):
        found[alias.model].aliases[alias.name] = alias.number
    return found


def versions(
    tx: Session, model: PublishedModel, number: int | None = None
) -> list[PublishedVersion]:
    """List the versions of a model, newest first. ``number``: only the one of this number."""
    query = (
        select(ModelVersion, Checkpoint)
        .join(Checkpoint, Checkpoint.id == ModelVersion.checkpoint)
        .where(ModelVersion.model == model.id)
        .order_by(ModelVersion.number.desc())
    )
    if number is not None:
        query = query.where(ModelVersion.number == number)
    aliases = summaries(tx, [model.id])[model.id].aliases
    return [
        PublishedVersion(
            model,
            version,
            saved,
            tuple(name for name, number in aliases.items() if number == version.number),
        )
        for version, saved in tx.execute(query)
    ]


def version(tx: Session, model: PublishedModel, wanted: ModelReference) -> PublishedVersion:
    """Return one version of a model: by its number, an alias, or the newest one.

    Raises:
        ModelVersionNotFound: The model has none with this number or alias.
    """
    summary = summaries(tx, [model.id])[model.id]
    number = summary.latest if wanted.number is None else wanted.number
    if wanted.alias not in (None, LATEST):
        number = summary.aliases.get(wanted.alias, 0)
    found = versions(tx, model, number)
    if not found:
        raise ModelVersionNotFound(_unknown(tx, model, wanted))
    return found[0]


def by_reference(tx: Session, reference: str, *, owner: str) -> PublishedVersion:
    """Return the version of an owner's model that ``name``, ``name@alias`` or ``name:3`` names.

    Raises:
        ModelNotFound, ModelVersionNotFound: There is no such model or version.
    """
    wanted = parse_model_reference(reference)
    if wanted is None:
        raise ModelNotFound(f"{reference[:100]!r} refers to no published model.")
    return version(tx, get(tx, wanted.name, owner=owner, sees=owner), wanted)


def _unknown(tx: Session, model: PublishedModel, wanted: ModelReference) -> str:
    """Return the message about a version that a model does not have, with those that it has."""
    found = versions(tx, model)
    numbers = _listed([one.version.number for one in found])
    if wanted.alias is None:
        return f"The model {model.name!r} has no version {wanted.number}; it has {numbers}."
    aliases = [LATEST, *(name for one in found for name in one.aliases)]
    near = did_you_mean(wanted.alias, aliases)
    has = f"its aliases are {', '.join(aliases)}, its versions {numbers}"
    return f"The model {model.name!r} has no alias {wanted.alias[:100]!r}{near}; {has}."


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers of versions, newest first, as a text."""
    shown = ", ".join(str(number) for number in numbers[:_LISTED])
    return shown + (f" and {len(numbers) - _LISTED} older" if len(numbers) > _LISTED else "")


def set_aliases(tx: Session, model: PublishedModel, changes: Mapping[str, int | None]) -> None:
    """Let aliases of a model that this transaction has locked name other versions.

    All of them change, or none. None removes an alias if there is one.

    Raises:
        InvalidRequest: The model lacks a version, or it would have too many aliases.
    """
    if not changes:
        return
    numbers = [one.version.number for one in versions(tx, model)]
    has = f"it has {_listed(numbers)}"
    problems = [
        FieldProblem(
            f"/aliases/{name}",
            f"the model {model.name!r} has no version {number}; {has}",
            "model_version_not_found",
        )
        for name, number in changes.items()
        if number is not None and number not in numbers
    ]
    if problems:
        raise InvalidRequest(str(problems[0]), problems=problems)
    _move(tx, model, changes)
    _changed(tx, model)


def _move(tx: Session, model: PublishedModel, changes: Mapping[str, int | None]) -> None:
    if not changes:
        return
    mine = ModelAlias.model == model.id
    tx.execute(sql_delete(ModelAlias).where(mine, ModelAlias.name.in_(changes)))
    rows = [
        {"model": model.id, "name": name, "number": number}
        for name, number in sorted(changes.items())
        if number is not None
    ]
    if rows:
        tx.execute(insert_into(tx, ModelAlias), rows)
    count = tx.scalars(select(func.count()).select_from(ModelAlias).where(mine)).one()
    if count > MAX_ALIASES:
        detail = (
            f"the model {model.name!r} would have {count} aliases; {MAX_ALIASES} is the maximum"
        )
        raise _invalid("/aliases", f"{detail}: remove some first", "too_many")


def delete(tx: Session, model: PublishedModel) -> None:
    """Delete a model that this transaction has locked, with its versions and aliases.

    Its checkpoints stay, as those of their jobs or as uploaded ones.

    Raises:
        ModelInUse: A job that has not ended uses one of its versions.
    """
    _check_unread(tx, versions(tx, model))
    tx.execute(sql_delete(PublishedModel).where(PublishedModel.id == model.id))


def delete_version(tx: Session, model: PublishedModel, number: int) -> None:
    """Delete one version of a model that this transaction has locked. Its checkpoint stays.

    Raises:
        ModelVersionNotFound: The model has no version of this number.
        ModelInUse: An alias names it, a job that has not ended uses it, or it is the only one.
    """
    one = version(tx, model, ModelReference(model.name, number=number))
    if summaries(tx, [model.id])[model.id].num_versions == 1:
        detail = f"Version {number} is the only one of {model.name!r}: delete the model instead"
        raise ModelInUse(f"{detail} (DELETE /models/{model.name}).")
    if one.aliases:
        named = ", ".join(repr(name) for name in one.aliases)
        detail = f"The alias {named} names version {number}" if len(one.aliases) == 1 else ""
        detail = detail or f"The aliases {named} name version {number}"
        raise ModelInUse(f"{detail}: move or remove it first (PATCH /models/{model.name}).")
    _check_unread(tx, [one])
    mine = (ModelVersion.model == model.id, ModelVersion.number == number)
    tx.execute(sql_delete(ModelVersion).where(*mine))
    _changed(tx, model)


def _check_unread(tx: Session, found: Sequence[PublishedVersion]) -> None:
    """Check that no job that has not ended reads the checkpoints of these versions.

    Raises:
        ModelInUse: One does.
    """
    ids = {one.checkpoint.id for one in found}
    references.lock(tx, Checkpoint, ids)
    read = references.read_by_jobs(tx, ids)
    for one in found:
        if one.checkpoint.id in read:
            detail = f"A job that has not ended uses version {one.version.number} of"
            detail += f" {one.model.name!r} ({one.checkpoint.id})"
            raise ModelInUse(f"{detail}: cancel the job, or wait for its end.")


def _changed(tx: Session, model: PublishedModel) -> None:
    model.revision += 1
    model.updated_at = now()
    tx.flush()


def forget_checkpoints(tx: Session, keys: Collection[str]) -> None:
    """Delete versions whose checkpoints are lost, by their keys, and models without versions.

    For a restored backup: the checkpoint was deleted while the backup was taken, after its version.
    """
    lost = select(Checkpoint.id).where(Checkpoint.key.in_(keys))
    tx.execute(sql_delete(ModelVersion).where(ModelVersion.checkpoint.in_(lost)))
    has_any = select(ModelVersion.number).where(ModelVersion.model == PublishedModel.id).exists()
    tx.execute(sql_delete(PublishedModel).where(~has_any))


def _invalid(pointer: str, detail: str, code: str) -> InvalidRequest:
    problem = FieldProblem(pointer, detail, code)
    return InvalidRequest(str(problem), problems=[problem])
