"""Keys that nobody has: bounded work for the database, and no lock-out of who has a good one."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import event

from api.http import access
from api.http.access import Keyring
from glasshouse.errors import KeyInvalid, TooManyInvalidKeys
from models import keys
from models.database import Database
from models.settings import Settings
from tests.running import Api
from tests.waiting import until


def make(database: Database, owner: str) -> str:
    with database.write() as tx:
        return keys.create(tx, name="k", owner=owner, scopes=["read"])[1]


@pytest.fixture
def looked_up(database: Database) -> list[str]:
    """Every question about keys that reaches the database."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM keys" in statement:
            found.append(statement)

    reader = database._reader  # pyright: ignore[reportPrivateUsage]
    for engine in {database.engine, reader} if database.is_sqlite else {database.engine}:
        event.listen(engine, "before_cursor_execute", note)
    return found


def outcome_of(ring: Keyring, secret: str, client: str) -> str:
    try:
        return asyncio.run(ring.check(secret, "key", client)).owner
    except (KeyInvalid, TooManyInvalidKeys) as error:
        return error.code


def test_unknown_keys_of_one_address_are_looked_up_some_times_and_no_more(
    database: Database,
    tmp_path: Path,
    looked_up: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    time: list[float] = [0.0]
    clock: Callable[[], float] = lambda: time[0]  # noqa: E731
    monkeypatch.setattr(access.time, "monotonic", clock)
    ring = Keyring(database, Settings(home=tmp_path))
    monkeypatch.setattr(ring._failures, "_clock", clock)  # pyright: ignore[reportPrivateUsage]
    good, other = make(database, "ada"), make(database, "bob")
    answers = [outcome_of(ring, keys.make_secret(), "10.0.0.1") for _ in range(200)]
    allowed = answers.count("key_invalid")
    assert allowed == 2 * access.FAILURES_PER_S
    assert answers[allowed:] == ["too_many_invalid_keys"] * (200 - allowed)
    assert len(looked_up) == allowed + 1, "each that was let through, and the list once"
    # neither of whom has a good key is locked out: from this address or from another
    assert outcome_of(ring, good, "10.0.0.1") == "ada"
    assert outcome_of(ring, other, "10.0.0.1") == "bob"
    assert outcome_of(ring, keys.make_secret(), "10.0.0.2") == "key_invalid"
    # a key that is made meanwhile opens as soon as the list is read again
    late = make(database, "eve")
    assert outcome_of(ring, late, "10.0.0.1") == "too_many_invalid_keys"
    time[0] += 0.01 + access.LISTED_S / 1000
    ring.forget()
    assert outcome_of(ring, late, "10.0.0.1") == "eve"
    # and after a while unknown keys are looked up again
    time[0] += 10.0
    assert outcome_of(ring, keys.make_secret(), "10.0.0.1") == "key_invalid"


def test_a_client_with_wrong_keys_has_to_wait_and_another_is_answered(service: Api):
    with httpx2.Client(base_url=service.url, timeout=120) as client:

        def ask(secret: str) -> httpx2.Response:
            return client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {secret}"})

        answers = [ask(keys.make_secret()) for _ in range(60)]
        refused = [one for one in answers if one.status_code == 429]
        assert refused
        assert refused[0].json()["code"] == "too_many_invalid_keys"
        assert int(refused[0].headers["retry-after"]) >= 1
        assert {one.status_code for one in answers} <= {401, 429}
        assert ask(service.admin).status_code == 200
        # a new key is accepted after a pause; until then, the other tests of this API have to wait
        until(lambda: ask(service.key("late")).status_code == 200)
