"""Published models: their numbers, their aliases, and what keeps their checkpoints."""

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update

from glasshouse.errors import (
    CheckpointInUse,
    CheckpointNotFound,
    Conflict,
    GlasshouseError,
    InvalidRequest,
    ModelInUse,
    ModelNotFound,
    ModelVersionNotFound,
)
from glasshouse.spec.model_names import ModelReference
from models import published_models
from models.backup import _forget_lost  # pyright: ignore[reportPrivateUsage]
from models.database import Database
from models.jobs import attempts, checkpoint_retention, checkpoints, jobs
from models.jobs.checkpoint_retention import RetentionRule
from models.jobs.leases import Claim
from models.published_models import PublishedVersion
from models.purge import Purge
from models.settings import Settings
from models.storage import references, retention
from models.storage.artifacts import LocalArtifacts
from models.tables import Checkpoint, Job, ModelAlias, ModelVersion, PublishedModel, now
from tests.interleaving import meetings

from .factories import make_job, make_worker, running, saved

NEWEST = ModelReference("m")


def upload(database: Database, owner: str = "ada", **values: Any) -> str:
    """An uploaded checkpoint."""
    made = saved(0, owner=owner, **values)
    made["key"] = f"checkpoints/{made['id']}"
    with database.write() as tx:
        tx.add(Checkpoint(**made))
    return made["id"]


def publish(
    database: Database,
    checkpoint: str,
    *aliases: str,
    name: str = "m",
    owner: str = "ada",
) -> PublishedVersion:
    with database.write() as tx:
        return published_models.publish(
            tx, owner=owner, name=name, checkpoint_id=checkpoint, aliases=aliases
        )


def model_of(tx: Any, name: str = "m", *, lock: bool = False) -> PublishedModel:
    return published_models.get(tx, name, owner="ada", sees="ada", lock=lock)


def numbers(database: Database, name: str = "m") -> dict[int, tuple[str, ...]]:
    """The versions of a model, newest first, with their aliases."""
    with database.read() as tx:
        found = published_models.versions(tx, model_of(tx, name))
    return {one.version.number: one.aliases for one in found}


def move(database: Database, name: str, **changes: int | None) -> None:
    with database.write() as tx:
        published_models.set_aliases(tx, model_of(tx, name, lock=True), changes)


def delete_version(database: Database, name: str, number: int) -> None:
    with database.write() as tx:
        published_models.delete_version(tx, model_of(tx, name, lock=True), number)


def delete_model(database: Database, name: str) -> None:
    with database.write() as tx:
        published_models.delete(tx, model_of(tx, name, lock=True))


def is_there(database: Database, checkpoint: str) -> bool:
    with database.read() as tx:
        return tx.get(Checkpoint, checkpoint) is not None


class Names:
    """A new model name for each order of an interleaving."""

    def __init__(self) -> None:
        self._next = count()

    def __call__(self) -> str:
        return f"m{next(self._next)}"


def refusal(act: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, which returns its error instead of raising it."""

    def caught(*given: Any) -> Any:
        try:
            return act(*given)
        except GlasshouseError as error:
            return error

    return caught


def test_numbers_are_dense_and_those_of_deleted_versions_are_not_used_again(database: Database):
    checkpoint = upload(database)
    assert [publish(database, checkpoint).version.number for _ in range(3)] == [1, 2, 3]
    assert publish(database, checkpoint, name="other").version.number == 1
    delete_version(database, "m", 3)
    assert publish(database, checkpoint).version.number == 4
    assert list(numbers(database)) == [4, 2, 1]
    with database.read() as tx:
        chosen = published_models.version(tx, model_of(tx), NEWEST)
    assert chosen.version.number == 4


def test_a_name_is_that_of_its_owner(database: Database):
    mine, theirs = upload(database), upload(database, "bob")
    one, two = publish(database, mine), publish(database, theirs, owner="bob")
    assert (one.version.number, two.version.number) == (1, 1)
    with database.read() as tx:
        for owner, sees, expected in (("ada", "ada", one), ("bob", None, two)):
            found = published_models.get(tx, "m", owner=owner, sees=sees)
            assert found.id == expected.model.id
        with pytest.raises(ModelNotFound, match=one.model.id):  # an admin without one of this name
            published_models.get(tx, "m", owner="root", sees=None)
        assert published_models.get(tx, two.model.id, owner="root", sees=None).owner == "bob"
        with pytest.raises(ModelNotFound):
            published_models.get(tx, two.model.id, owner="ada", sees="ada")


def test_aliases_move_all_at_once_or_not_at_all(database: Database):
    checkpoint = upload(database)
    publish(database, checkpoint, "production")
    publish(database, checkpoint, "candidate")
    move(database, "m", production=2, candidate=1)  # swapped
    assert numbers(database) == {2: ("production",), 1: ("candidate",)}
    with pytest.raises(InvalidRequest) as refused:
        move(database, "m", production=1, candidate=7)
    (problem,) = refused.value.problems
    assert problem.pointer == "/aliases/candidate"
    assert "no version 7; it has 2, 1" in problem.detail
    move(database, "m", candidate=None, absent=None)
    assert numbers(database) == {2: ("production",), 1: ()}
    publish(database, checkpoint, "production")
    assert numbers(database) == {3: ("production",), 2: (), 1: ()}


def test_what_a_model_does_not_have_is_said_with_what_it_has(database: Database):
    checkpoint = upload(database)
    publish(database, checkpoint, "production", name="mnist")
    with database.read() as tx:
        with pytest.raises(ModelNotFound, match="did you mean mnist"):
            model_of(tx, "mnits")
        model = model_of(tx, "mnist")
        for wanted, message in (
            (ModelReference("mnist", alias="prodution"), "did you mean production"),
            (
                ModelReference("mnist", alias="x"),
                "its aliases are latest, production, its versions 1",
            ),
            (ModelReference("mnist", number=2), "no version 2; it has 1"),
        ):
            with pytest.raises(ModelVersionNotFound, match=message):
                published_models.version(tx, model, wanted)
        latest = published_models.version(tx, model, ModelReference("mnist", alias="latest"))
    assert latest.version.number == 1


def test_a_version_with_an_alias_a_job_or_without_another_is_not_deleted(database: Database):
    checkpoint, used = upload(database), upload(database)
    publish(database, checkpoint, "production")
    with pytest.raises(ModelInUse, match="only one"):
        delete_version(database, "m", 1)
    publish(database, used)
    with pytest.raises(ModelInUse, match="alias 'production'"):
        delete_version(database, "m", 1)
    with database.write() as tx:
        job = jobs.add(tx, owner="ada", spec={"kind": "infer"}, resolved={}, plan={}, uses=[used])
    with pytest.raises(ModelInUse, match="A job that has not ended uses version 2"):
        delete_version(database, "m", 2)
    with pytest.raises(ModelInUse, match="A job that has not ended uses version 2"):
        delete_model(database, "m")
    with database.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, job.id, None), by="ada", force=False)
    delete_version(database, "m", 2)
    delete_model(database, "m")
    with database.read() as tx:
        assert checkpoints.get(tx, used, "ada").id == used
        for table in (PublishedModel, ModelVersion, ModelAlias):
            assert tx.scalar(select(func.count()).select_from(table)) == 0


def test_damaged_files_and_too_many_versions_and_aliases_are_refused(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(InvalidRequest, match="damaged"):
        publish(database, upload(database, state="damaged"))
    with database.read() as tx, pytest.raises(ModelNotFound):
        model_of(tx)
    monkeypatch.setattr(published_models, "MAX_VERSIONS", 2)
    monkeypatch.setattr(published_models, "MAX_ALIASES", 2)
    checkpoint = upload(database)
    publish(database, checkpoint, "a", "b")
    with pytest.raises(InvalidRequest, match="3 aliases"):
        publish(database, checkpoint, "c")
    publish(database, checkpoint, "b")
    with pytest.raises(Conflict, match="2 versions"):
        publish(database, checkpoint)
    assert numbers(database) == {2: ("b",), 1: ("a",)}


def ended_job(database: Database, *steps: int) -> tuple[Job, list[str]]:
    """A job that has ended, with checkpoints."""
    job = make_job(database)
    claim = running(database, job)
    rows = [saved(step, key=f"jobs/{job.id}/1/checkpoints/{step}") for step in steps]
    with database.write() as tx:
        checkpoints.add(tx, job.id, claim.attempt, rows)
        assert attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
    return job, [row["id"] for row in rows]


def test_a_published_checkpoint_its_job_and_its_network_stay(database: Database, tmp_path: Path):
    make_worker(database, cores=8)
    job, (old, new) = ended_job(database, 2, 4)
    publish(database, old, "production", name="mnist")
    with database.write() as tx, pytest.raises(CheckpointInUse, match=r"'mnist'.*version 1"):
        checkpoints.delete(tx, checkpoints.get(tx, old, "ada"))
    with database.write() as tx, pytest.raises(CheckpointInUse, match="'mnist'"):
        jobs.delete(tx, jobs.get(tx, job.id, "ada", lock=True))
    settings = Settings(home=tmp_path, keep_jobs_days=0, keep_checkpoints_days=0)
    purge = Purge(settings, database, LocalArtifacts(settings.artifacts))
    with database.write() as tx:
        tx.execute(update(Job).values(ended_at=now() - timedelta(days=1)))
    assert purge.plan().rows == {"checkpoints": 1}
    assert purge.run().rows.get("checkpoints") == 1
    assert (is_there(database, old), is_there(database, new)) == (True, False)
    with database.write() as tx:
        assert checkpoints.trained(tx, checkpoints.get(tx, old, "ada")) == {}
        assert not retention.forget_job(tx, job.id, now())
    delete_model(database, "mnist")
    assert purge.run().rows["jobs"] == 1
    assert not is_there(database, old)


def test_the_name_of_a_model_of_another_owner_is_not_told(database: Database):
    checkpoint = upload(database)
    publish(database, checkpoint, name="secret", owner="root")
    with database.write() as tx, pytest.raises(CheckpointInUse) as refused:
        checkpoints.delete(tx, checkpoints.get(tx, checkpoint, "ada"))
    assert "secret" not in str(refused.value)
    assert "another owner" in str(refused.value)


def test_a_restored_backup_has_no_version_without_its_checkpoint(database: Database):
    kept, lost = upload(database), upload(database)
    publish(database, kept)
    publish(database, lost, "production")
    publish(database, lost, name="gone")
    with database.write() as tx:
        _forget_lost(tx, [f"checkpoints/{lost}"])
    assert not is_there(database, lost)
    assert numbers(database) == {1: ()}
    with database.read() as tx, pytest.raises(ModelNotFound):
        model_of(tx, "gone")


def test_two_clients_publish_under_one_name(database: Database):
    checkpoint = upload(database)

    def add(database: Database, name: str) -> int:
        return publish(database, checkpoint, "newest", name=name).version.number

    for meeting in meetings(database.url, Names(), add, add, most=30):
        assert sorted(meeting.values) == [1, 2], meeting.statements
        assert numbers(database, meeting.state) == {2: ("newest",), 1: ()}, meeting.statements


def test_a_model_is_published_while_it_is_deleted(database: Database):
    checkpoint, names = upload(database), Names()

    def prepare() -> str:
        name = names()
        publish(database, checkpoint, name=name)
        return name

    def add(database: Database, name: str) -> int:
        return publish(database, checkpoint, name=name).version.number

    for meeting in meetings(database.url, prepare, add, delete_model, most=30):
        number, _ = meeting.values
        if number == 1:  # the name was free again
            assert numbers(database, meeting.state) == {1: ()}, meeting.statements
        else:
            with database.read() as tx, pytest.raises(ModelNotFound):
                model_of(tx, meeting.state)


def test_an_alias_moves_to_a_version_while_it_is_deleted(database: Database):
    checkpoint, names = upload(database), Names()

    def prepare() -> str:
        name = names()
        publish(database, checkpoint, name=name)
        publish(database, checkpoint, name=name)
        return name

    def point(database: Database, name: str) -> None:
        move(database, name, production=1)

    def remove(database: Database, name: str) -> None:
        delete_version(database, name, 1)

    acts = refusal(point), refusal(remove)
    for meeting in meetings(database.url, prepare, *acts, most=30):
        moved, deleted = meeting.values
        left = numbers(database, meeting.state)
        if deleted is None:
            assert isinstance(moved, InvalidRequest), meeting.statements
            assert left == {2: ()}
        else:
            assert isinstance(deleted, ModelInUse), meeting.statements
            assert left == {2: (), 1: ("production",)}


def publishing(names: Names) -> Callable[[Database, Any], str | CheckpointNotFound]:
    """Publishes the checkpoint of a state, which is its id or begins with it."""

    def act(database: Database, state: Any) -> Any:
        checkpoint = state if isinstance(state, str) else state[0]
        return publish(database, checkpoint, "production", name=names()).checkpoint.id

    return refusal(act)


def check_kept_or_refused(database: Database, checkpoint: str, published: Any, said: Any) -> None:
    """Either it is published and there, or it is gone and the publication was refused."""
    if isinstance(published, CheckpointNotFound):
        assert not is_there(database, checkpoint), said
    else:
        assert published == checkpoint, said
        assert is_there(database, checkpoint), said


def test_a_checkpoint_is_published_while_it_is_deleted(database: Database):
    def remove(database: Database, checkpoint: str) -> None:
        with database.write() as tx:
            checkpoints.delete(tx, checkpoints.get(tx, checkpoint, "ada"))

    refused: set[bool] = set()
    for meeting in meetings(
        database.url, lambda: upload(database), publishing(Names()), refusal(remove), most=30
    ):
        published, deleted = meeting.values
        assert (deleted is None) == isinstance(published, CheckpointNotFound), meeting.statements
        assert deleted is None or isinstance(deleted, CheckpointInUse | CheckpointNotFound)
        check_kept_or_refused(database, meeting.state, published, meeting.statements)
        refused.add(deleted is None)
    assert refused == {True, False}


def test_a_checkpoint_is_published_while_a_newer_one_supersedes_it(database: Database):
    make_worker(database, cores=1)
    job = make_job(database)
    claim: Claim = running(database, job)

    def prepare() -> str:
        with database.write() as tx:
            tx.execute(update(ModelVersion).values(checkpoint=kept))
            tx.execute(delete(Checkpoint).where(Checkpoint.job == job.id))
            row = saved(2)
            checkpoints.add(tx, job.id, claim.attempt, [row])
        return row["id"]

    def save(database: Database, _: str) -> None:
        with database.write() as tx:
            checkpoints.add(tx, job.id, claim.attempt, [saved(4)])
            checkpoint_retention.supersede(tx, job.id, RetentionRule(last=1))

    kept = upload(database)
    for meeting in meetings(database.url, prepare, publishing(Names()), save, most=30):
        published, _ = meeting.values
        check_kept_or_refused(database, meeting.state, published, meeting.statements)


@pytest.mark.parametrize("by", ["client", "purge"])
def test_a_checkpoint_is_published_while_its_job_is_deleted(database: Database, by: str):
    make_worker(database, cores=200)

    def prepare() -> tuple[str, str]:
        job, (checkpoint,) = ended_job(database, 2)
        return checkpoint, job.id

    def remove(database: Database, state: tuple[str, str]) -> None:
        with database.write() as tx:
            jobs.delete(tx, jobs.get(tx, state[1], "ada", lock=True))

    def purge(database: Database, state: tuple[str, str]) -> None:
        (kind,) = [kind for kind in retention.KINDS if kind.name == "checkpoints"]
        later = now() + timedelta(days=1)
        with database.write() as tx:
            kind.some(tx, state[1], 10)
        with database.write() as tx:
            retention.forget_job(tx, state[1], later)

    acts = {"client": refusal(remove), "purge": purge}
    for meeting in meetings(database.url, prepare, publishing(Names()), acts[by], most=25):
        (checkpoint, job), (published, _) = meeting.state, meeting.values
        check_kept_or_refused(database, checkpoint, published, meeting.statements)
        if published == checkpoint:
            with database.read() as tx:  # which has its network
                assert jobs.whole(tx, job, "ada").id == job, meeting.statements


def test_a_version_is_deleted_while_a_job_that_uses_it_is_stored(database: Database):
    names = Names()

    def prepare() -> tuple[str, str]:
        name, checkpoint = names(), upload(database)
        publish(database, checkpoint, name=name)
        publish(database, upload(database), name=name)
        return name, checkpoint

    def submit(database: Database, state: tuple[str, str]) -> str:
        with database.write() as tx:
            references.share(tx, [state[1]])
            checkpoints.get(tx, state[1], None)
            spec = {"kind": "infer"}
            return jobs.add(tx, owner="ada", spec=spec, resolved={}, plan={}, uses=[state[1]]).id

    def remove(database: Database, state: tuple[str, str]) -> None:
        delete_version(database, state[0], 1)

    for meeting in meetings(database.url, prepare, submit, refusal(remove), most=30):
        _, deleted = meeting.values
        assert is_there(database, meeting.state[1]), meeting.statements
        left = numbers(database, meeting.state[0])
        assert left == ({2: ()} if deleted is None else {2: (), 1: ()}), meeting.statements
