"""X11, X13: keys are strong, kept as hashes, and found in no dump, log or address."""

import math
import sqlite3
from collections import Counter

import httpx2
import pytest

from models import keys
from tests import leaks
from tests.running import Api, running_api
from tests.security.populated_api import PopulatedApi


def test_a_key_has_256_random_bits():
    made = [keys.make_secret() for _ in range(2000)]
    assert len(set(made)) == len(made)
    bodies = [secret.removeprefix("gh_").partition("_")[0] for secret in made]
    assert all(len(body) == 43 for body in bodies)
    assert 43 * math.log2(62) > 256 - 1
    for place in range(43):
        counted = Counter(body[place] for body in bodies)
        assert len(counted) == 62
        assert max(counted.values()) < 3 * 2000 / 62, "a character stands out"


def test_one_wrong_character_is_seen_without_asking_the_database():
    secret = keys.make_secret()
    assert keys.is_well_formed(secret)
    for place in range(3, len(secret)):
        if secret[place] != "_":
            other = "A" if secret[place] != "A" else "B"
            assert not keys.is_well_formed(secret[:place] + other + secret[place + 1 :])
    for wrong in ("", "gh_", secret[:-1], secret + "x", secret.upper(), " " + secret, "ñ" * 53):
        assert not keys.is_well_formed(wrong)


def test_a_dump_of_the_database_opens_nothing(populated: PopulatedApi):
    path = populated.api.settings.database.removeprefix("sqlite:///")
    with populated.api.client(populated.ada) as client:
        ticket = client.post("/api/v1/tickets").json()["url"]
    with httpx2.Client() as browser:
        session = browser.get(ticket).cookies["glasshouse_session"]
    connection = sqlite3.connect(path)
    dump = "\n".join(connection.iterdump())
    connection.close()
    secrets = [
        populated.ada,
        populated.bob,
        populated.api.admin,
        session,
        ticket.partition("ticket=")[2],
    ]
    leaks.check_bytes(dump.encode(), "the dump", *secrets)
    for secret in secrets:
        assert secret[8:40] not in dump, "a part of a key"
    with populated.api.database.read() as tx:
        hashes = [row.sha256 for row in keys.find(tx, after=None, limit=100)]
    assert len(hashes) > 2
    for stolen in [*hashes, *(f"gh_{found[:43]}_000000" for found in hashes)]:
        with populated.api.client(stolen) as thief:
            assert thief.get("/api/v1/jobs").status_code == 401


@pytest.mark.parametrize("name", ["api_key", "key", "token", "access_token", "authorization"])
def test_no_key_is_accepted_in_a_url(populated: PopulatedApi, nobody: httpx2.Client, name: str):
    assert nobody.get("/api/v1/jobs", params={name: populated.ada}).status_code == 401
    with_body = nobody.post("/api/v1/jobs", json={name: populated.ada})
    assert with_body.status_code == 401


def test_a_ticket_is_short_lived_and_used_once(populated: PopulatedApi):
    with populated.api.client(populated.ada) as client:
        made = client.post("/api/v1/tickets").json()
    assert made["expires_in_s"] <= 60
    with httpx2.Client() as browser:
        assert browser.get(made["url"]).status_code == 303
    with httpx2.Client() as browser:
        assert browser.get(made["url"]).status_code == 401


@pytest.mark.parametrize(
    "settings",
    [
        {"redis_url": "redis://:S3cret-of-redis@127.0.0.1:1/0"},
        {"redis_url": "redis://someone:S3cret-of-redis@127.0.0.1:1/0"},
    ],
)
def test_a_password_of_the_broker_is_printed_nowhere(settings: dict[str, str]):
    with running_api(**settings) as api:
        said = _provoke(api)
        leaks.check_bytes(said.encode() + api.log.encode(), "an answer or the log", "S3cret-of")


def test_a_password_of_the_database_is_printed_nowhere():
    with running_api() as api:
        api.stop()
        url = "postgresql+psycopg://someone:S3cret-of-sql@127.0.0.1:1/glasshouse"
        api.environment["GLASSHOUSE_DATABASE_URL"] = url
        api.start()
        said = _provoke(api)
        leaks.check_bytes(said.encode() + api.log.encode(), "an answer or the log", "S3cret-of")


def _provoke(api: Api) -> str:
    with api.client() as client:
        paths = ("/readyz", "/api/v1/jobs", "/metrics", "/api/v1/", "/api/v1/workers", "/nothing")
        answers = [client.get(path) for path in paths]
        answers.append(client.post("/api/v1/jobs", json={"kind": "train"}))
    return "".join(answer.text + str(answer.headers) for answer in answers)
