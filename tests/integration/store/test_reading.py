"""Who reads an uploaded file: one worker at a time, again after a loss, and nobody too late."""

from sqlalchemy import update

from models.database import Database
from models.storage import datasets
from models.storage.datasets import Reading
from models.tables import Dataset

MINUTE = 60_000


def add(database: Database, *owners: str) -> list[str]:
    """A pending dataset of each owner, oldest first."""
    with database.write() as tx:
        made = [
            datasets.add(tx, owner=owner, name="d", format="csv", size_bytes=1, sha256=None)
            for owner in owners
        ]
        return [row.id for row in made]


def claim(database: Database, reader: str = "one") -> Reading | None:
    with database.write() as tx:
        return datasets.claim(tx, reader, lease_ms=MINUTE)


def silence(database: Database, dataset: str) -> None:
    """Let the lease of its reader run out."""
    with database.write() as tx:
        tx.execute(update(Dataset).where(Dataset.id == dataset).values(reading_until_ms=1))


def settle(database: Database, reading: Reading, key: str) -> bool:
    with database.write() as tx:
        return datasets.read(tx, reading, columns=[], splits={"all": 1}, key=key)


def test_each_file_is_read_by_one_worker(database: Database):
    made = add(database, "ada", "ada")
    found = [claim(database, reader) for reader in ("one", "two", "three")]
    assert [one and one.dataset for one in found] == [*made, None]
    with database.read() as tx:
        assert not datasets.is_unread(tx)


def test_two_workers_that_claim_at_the_same_time_get_different_files(postgres_database: Database):
    """On PostgreSQL both are within their transactions; SQLite lets one write at a time."""
    database = postgres_database
    made = add(database, "ada", "ada")
    with database.write() as first, database.write() as second:
        one = datasets.claim(first, "one", lease_ms=MINUTE)
        two = datasets.claim(second, "two", lease_ms=MINUTE)
        three = None
        with database.write() as third:
            three = datasets.claim(third, "three", lease_ms=MINUTE)
    assert one is not None
    assert two is not None
    assert {one.dataset, two.dataset} == {*made}
    assert three is None


def test_an_owner_with_many_uploads_does_not_delay_others(database: Database):
    ada, *_, bob = add(database, "ada", "ada", "ada", "bob")
    found = [claim(database) for _ in range(3)]
    assert [one and one.dataset for one in found][:2] == [ada, bob]


def test_a_file_of_an_unresponsive_worker_is_read_by_another_and_the_first_is_too_late(
    database: Database,
):
    (made,) = add(database, "ada")
    first = claim(database)
    assert first is not None
    silence(database, made)
    second = claim(database, "two")
    assert second is not None
    assert (second.dataset, second.tries) == (made, 2)
    with database.write() as tx:
        assert not datasets.renew(tx, first, lease_ms=MINUTE)
        assert not datasets.unreadable(tx, first, {"code": "late"})
        assert not datasets.give_back(tx, first)
    assert not settle(database, first, "datasets/d/first")
    assert settle(database, second, "datasets/d/second")
    assert not settle(database, first, "datasets/d/first")
    with database.read() as tx:
        row = datasets.get(tx, made, "ada")
        assert (row.state, row.key, row.reader) == ("ready", "datasets/d/second", "two")


def test_a_commit_whose_outcome_is_not_known_can_be_made_again(database: Database):
    (made,) = add(database, "ada")
    reading = claim(database)
    assert reading is not None
    assert settle(database, reading, "datasets/d/1")
    assert settle(database, reading, "datasets/d/1")
    with database.read() as tx:
        assert datasets.get(tx, made, None).version == 2


def test_what_a_worker_gives_back_is_read_at_once_and_does_not_count_as_a_try(database: Database):
    (made,) = add(database, "ada")
    first = claim(database)
    assert first is not None
    with database.write() as tx:
        assert datasets.give_back(tx, first)
    again = claim(database, "two")
    assert again is not None
    assert (again.dataset, again.tries) == (made, 1)
