"""The data of the previous release, which was killed while it ran, is served by this version."""

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command as alembic
from alembic.script import ScriptDirectory
from sqlalchemy import text

import migrations
from glasshouse.cli.service.processes import ROOT
from models import startup
from models.database import Database
from models.migrate import config
from models.settings import Settings
from tests import leaks
from tests.conftest import empty_postgres
from tests.integration.stack import releases
from tests.integration.stack.conftest import end, up
from tests.running import Api, connected, database_of, running_api
from tests.waiting import until

SAID = releases.said(releases.PREVIOUS)
UNCOMPARED = {"request_id", "version", "limits", "links", "retryable"}


def revision_of(file: Path) -> str:
    return file.stem


@pytest.fixture
def home() -> Generator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
    yield folder / "home"
    leaks.check_home(folder)
    shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def previous(request: pytest.FixtureRequest, home: Path) -> Settings:
    """What the previous release has left: its tables, its rows and its files."""
    url = ""
    if request.param == "postgresql":
        server: str = request.getfixturevalue("postgres")
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(connected(server), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        url = database_of(server, name)
    return left_by_previous(home, url)


def left_by_previous(home: Path, url: str) -> Settings:
    settings = Settings(home=home, database_url=url)
    home.mkdir(mode=0o700)
    settings.artifacts.mkdir(mode=0o700)
    releases.unpack_files(releases.PREVIOUS, settings.artifacts)
    database = Database(settings.database)
    with database.engine.connect() as connection:
        alembic.upgrade(config(connection), revision_of(releases.PREVIOUS))
        connection.commit()
        releases.insert_rows(releases.PREVIOUS, connection)
        connection.commit()
    database.close()
    return settings


def run(settings: Settings, *module: str) -> subprocess.CompletedProcess[str]:
    environment = {"GLASSHOUSE_HOME": str(settings.home)}
    environment |= {"GLASSHOUSE_DATABASE_URL": settings.database_url}
    return subprocess.run(
        [sys.executable, "-m", *module],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_file_of_a_migration_is_named_by_its_revision_and_they_are_in_a_line():
    script = ScriptDirectory(str(Path(migrations.__file__).parent))
    found = [one.revision for one in script.walk_revisions()]
    assert found == sorted(found, reverse=True)
    assert startup.head() == script.get_current_head() == found[0]
    assert list(startup._known()) == found


def test_what_the_previous_release_has_stored_is_served_after_its_migration(previous: Settings):
    done = run(previous, "models.migrate", "--json")
    assert done.returncode == 0, done.stderr
    assert startup.head() in done.stdout
    api = Api(previous.home, previous.database_url)
    api.start()
    try:
        for path, answer in SAID["answers"].items():
            with api.client(SAID["key"]) as client:
                found = client.get(f"/api/v1{path}")
            assert found.status_code == 200, (path, found.text)
            said = found.json()
            if path == "/keys":  # one is the test's own
                said["data"] = [row for row in said["data"] if row["owner"] != "admin"]
            assert_holds(answer, said, path)
        with api.client(SAID["reader"]) as client:
            assert client.get(f"/api/v1/jobs/{SAID['waiting']}").json()["state"] == "queued"
            assert client.delete(f"/api/v1/jobs/{SAID['waiting']}").status_code == 403
            for row in SAID["answers"][f"/jobs/{SAID['job']}/checkpoints"]["data"]:
                weights = client.get(f"/api/v1/checkpoints/{row['id']}/weights")
                assert (weights.status_code, len(weights.content) > 100) == (200, True)
    finally:
        api.stop()
        api.database.close()


def assert_holds(old: Any, new: Any, where: str) -> None:
    """All that the old answer said is in the new one, which may say more."""
    if isinstance(old, dict):
        for name, value in old.items():
            if name not in UNCOMPARED:
                assert name in new, f"{where}/{name}"
                assert_holds(value, new[name], f"{where}/{name}")
    elif isinstance(old, list):
        assert len(old) == len(new), where
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            assert_holds(one, other, f"{where}/{number}")
    else:
        assert old == new, where


def test_jobs_of_the_previous_release_that_ran_or_waited_are_run_to_their_ends(home: Path):
    """By the one command of a single host, which migrates by itself."""
    left_by_previous(home, "")
    running = up(home)
    try:
        with running.client() as client:
            for name in ("running", "waiting"):
                job = client.jobs.get(SAID[name])
                assert job.wait(120).state == "succeeded"
            ran = client.jobs.get(SAID["running"])
            assert ran.attempt > 1
            begun = list(ran.events(types=["attempt"]))
            assert begun[-1].resumed_from_step in range(500, 6000, 500)
            losses = ran.metrics("loss")
            assert list(losses.steps) == list(range(6000))
    finally:
        end(running)


@pytest.fixture
def current(request: pytest.FixtureRequest, home: Path) -> Settings:
    """An empty database of this version."""
    home.mkdir(mode=0o700)
    if request.param == "postgresql":
        return Settings(home=home, database_url=empty_postgres(request))
    shutil.copyfile(request.getfixturevalue("sqlite_template"), home / "glasshouse.db")
    return Settings(home=home)


OLDER = ("0015", "run 'glasshouse backup DIRECTORY' and 'glasshouse migrate'")
NEWER = ("9999", "newer")


@pytest.mark.parametrize(
    ("found", "advice", "current"),
    [
        (*OLDER, "sqlite"),
        (*NEWER, "postgresql"),
        pytest.param(*OLDER, "postgresql", marks=pytest.mark.slow),
        pytest.param(*NEWER, "sqlite", marks=pytest.mark.slow),
    ],
    indirect=["current"],
)
def test_nothing_starts_on_the_schema_of_another_version(
    found: str, advice: str, current: Settings
):
    database = Database(current.database)
    assert startup.refusal(current, database) is None
    with database.write() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = :found"), {"found": found})
    modules = [["api", "--port", "0"], ["worker"]]
    for module in modules if found < startup.head() else [*modules, ["models.migrate"]]:
        done = run(current, *module)
        assert done.returncode == (1 if module == ["models.migrate"] else 2)
        assert f"revision {found}" in done.stderr
        assert advice in done.stderr
    with database.read() as tx:
        assert startup.revision(tx) == found
    database.close()


def test_an_api_that_was_not_stopped_says_that_the_schema_has_moved_on(tmp_path: Path):
    with running_api() as api, api.client() as client:
        assert client.get("/readyz").json()["checks"]["schema"] == "ok"
        with api.database.write() as tx:
            tx.execute(text("UPDATE alembic_version SET version_num = '9999'"))

        def moved() -> bool:
            answer = client.get("/readyz")
            return answer.status_code == 503 and "9999" in answer.json()["checks"]["schema"]

        assert until(moved)


def test_a_home_without_a_database_asks_for_the_migration(home: Path):
    home.mkdir(mode=0o700)
    done = run(Settings(home=home), "api", "--port", "0")
    assert (done.returncode, "glasshouse migrate" in done.stderr) == (2, True)
    assert not (home / "glasshouse.db").exists()
