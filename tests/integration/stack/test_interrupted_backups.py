"""Whatever is killed while a backup or a restore runs: nothing half-done looks whole."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

from glasshouse.cli.service.processes import ROOT
from models import backup, database, startup
from models.backup import BackupError
from models.database import Database
from models.migrate import migrate
from models.settings import Settings
from models.startup import UNFINISHED
from models.storage.artifacts import LocalArtifacts
from models.tables import Dataset
from tests.integration.stack.test_backup import tools_of
from tests.integration.store.factories import losses, make_job, make_worker, running, ship
from tests.running import Postgres, connected, database_of
from tests.waiting import until

NUM_STEPS = 50
KILLED = [
    "backup",
    "server",
    pytest.param("client", marks=pytest.mark.slow),
    pytest.param("program", marks=pytest.mark.slow),
]
"""What is killed: the command, the database server, the command by SIGTERM, pg_dump itself."""


@dataclass
class Server:
    """A PostgreSQL server, and what the tests ask of it."""

    url: str
    tools: str
    process: Postgres | None = None
    """Where the test may kill it."""

    def make(self) -> str:
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(connected(self.url), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return database_of(self.url, name)

    def make_again(self, url: str) -> None:
        name = make_url(url).database
        with psycopg.connect(connected(self.url), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
            connection.execute(f'CREATE DATABASE "{name}"')

    def sessions(self, program: str) -> list[dict[str, Any]]:
        """What the sessions of a program do in the databases of these tests."""
        query = (
            "SELECT pid, state, wait_event_type, wait_event, "
            "extract(epoch FROM clock_timestamp() - state_change) AS since_s "
            "FROM pg_stat_activity WHERE application_name = %s AND datname ~ '^t[0-9a-f]{32}$'"
        )
        factory = psycopg.rows.dict_row
        with psycopg.connect(connected(self.url), row_factory=factory) as connection:
            return connection.execute(query, [program]).fetchall()

    def waits(self, program: str) -> bool:
        return any(one["wait_event_type"] == "Lock" for one in self.sessions(program))


@pytest.fixture
def who() -> str:
    """What is killed."""
    return "nobody"


@pytest.fixture
def server(who: str, request: pytest.FixtureRequest) -> Server:
    if who == "server":
        own: Postgres = request.getfixturevalue("own_postgres")
        return Server(own.url, tools_of(own.url), own)
    url: str = request.getfixturevalue("postgres")
    return Server(url, tools_of(url))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def filled(settings: Settings) -> str:
    """A service with a job, its events, and a dataset with two files; the dataset's key."""
    settings.home.mkdir(mode=0o700)
    opened = Database(settings.database)
    migrate(opened, lock_file=settings.home / "run" / "migrate.lock")
    make_worker(opened)
    claim = running(opened, make_job(opened, owner="ada"))
    assert ship(opened, claim, losses(*((step, 1.0) for step in range(NUM_STEPS))), (0, 10))
    made = settings.home / "made"
    made.mkdir()
    for name in ("train.npy", "validation.npy"):
        (made / name).write_bytes(name.encode() * 100)
    LocalArtifacts(settings.artifacts).put("datasets/ds_1", made)
    row: dict[str, Any] = {"id": "ds_1", "owner": "ada", "name": "d", "format": "npy"}
    row |= {"state": "ready", "size_bytes": 1, "columns": [], "splits": {}, "key": "datasets/ds_1"}
    with opened.write() as tx:
        tx.add(Dataset(**row, created_at=database.database_time(tx)))
    opened.close()
    return "datasets/ds_1"


def started(action: str, directory: Path, settings: Settings, tools: str) -> subprocess.Popen[str]:
    """``python -m models.backup``, under way."""
    return subprocess.Popen(
        [sys.executable, "-m", "models.backup", action, str(directory)],
        env=environment(settings, tools),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def environment(settings: Settings, tools: str = "") -> dict[str, str]:
    return os.environ | {
        "PATH": os.pathsep.join(part for part in (tools, os.environ["PATH"]) if part),
        "GLASSHOUSE_HOME": str(settings.home),
        "GLASSHOUSE_DATABASE_URL": settings.database_url,
    }


def refused(settings: Settings, *module: str) -> str:
    """What a process of the service says when it refuses to start."""
    command = [sys.executable, "-m", *module]
    done = subprocess.run(
        command,
        env=environment(settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (1, 2), done.stdout + done.stderr
    return done.stderr


def assert_nothing_starts(settings: Settings) -> None:
    for module in (["api", "--port", "0"], ["worker"], ["models.migrate"]):
        assert "did not finish" in refused(settings, *module), module


@contextmanager
def locked_events(url: str) -> Generator[None]:
    """pg_dump stands still: it may not read the events."""
    with psycopg.connect(connected(url)) as connection:
        connection.execute("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
        yield


@contextmanager
def locked_indexes(url: str) -> Generator[None]:
    """pg_restore stands still once it has restored the rows: it may not make an index."""
    with psycopg.connect(connected(url), autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION public.stand_still() RETURNS event_trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); END $$"
        )
        connection.execute(
            "CREATE EVENT TRIGGER stand_still ON ddl_command_end WHEN TAG IN ('CREATE INDEX') "
            "EXECUTE FUNCTION public.stand_still()"
        )
        connection.execute("SELECT pg_advisory_lock(7)")
        yield


def kill(who: str, process: subprocess.Popen[str], server: Server) -> None:
    if server.process is not None:
        server.process.kill()
    elif who == "program":
        (child,) = children(process.pid)
        os.kill(child, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGKILL if who == "backup" else signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    if server.process is not None:
        server.process.start()


def children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]


def test_a_dump_that_takes_longer_than_a_transaction_may_be_idle_is_whole(
    server: Server, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = Settings(home=home, database_url=server.make())
    filled(settings)
    monkeypatch.setenv("PATH", os.pathsep.join((server.tools, os.environ["PATH"])))
    monkeypatch.setattr(database, "IDLE_IN_TRANSACTION_S", 1)
    problems: list[BaseException] = []

    def create() -> None:
        try:
            backup.create(settings, tmp_path / "backup")
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=create)
    with locked_events(settings.database_url):
        thread.start()
        until(lambda: server.waits("pg_dump"))
        until(lambda: _has_ended_or_outlived(server, 3.0))
    thread.join(60)
    assert problems == []
    assert (tmp_path / "backup" / "manifest.json").exists()


def _has_ended_or_outlived(server: Server, limit_s: float) -> bool:
    """The transaction that the snapshot is of: cut off by PostgreSQL, or longer idle than that."""
    idle = [one for one in server.sessions("") if one["state"] == "idle in transaction"]
    held = [one for one in idle if one["wait_event"] == "ClientRead"]
    # the test's own connection, which holds the lock, is one of them
    return len(held) < 2 or all(one["since_s"] > limit_s for one in held)


@pytest.mark.parametrize("who", KILLED)
def test_a_killed_backup_is_invalid(who: str, server: Server, home: Path, tmp_path: Path):
    settings = Settings(home=home, database_url=server.make())
    filled(settings)
    where = tmp_path / "backup"
    with locked_events(settings.database_url) if who != "server" else lock_until_killed(settings):
        process = started("create", where, settings, server.tools)
        until(lambda: server.waits("pg_dump"))
        kill(who, process, server)
    assert not (where / "manifest.json").exists()
    with pytest.raises(BackupError, match=r"has no manifest\.json"):
        backup.restore(Settings(home=tmp_path / "new", database_url=server.make()), where)
    until(lambda: not server.sessions("pg_dump"))
    shutil.rmtree(where)
    done = started("create", where, settings, server.tools)
    said, _ = done.communicate(timeout=120)
    assert done.returncode == 0, said


@contextmanager
def lock_until_killed(settings: Settings) -> Generator[None]:
    try:
        with locked_events(settings.database_url):
            yield
    except psycopg.OperationalError:  # the server that held the lock is gone
        pass


@pytest.mark.parametrize("who", KILLED)
def test_a_restore_that_is_killed_is_refused_at_start_until_it_is_done_again(
    who: str, server: Server, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", os.pathsep.join((server.tools, os.environ["PATH"])))
    settings = Settings(home=home, database_url=server.make())
    key = filled(settings)
    where = tmp_path / "backup"
    backup.create(settings, where)
    new = Settings(home=tmp_path / "new", database_url=server.make())
    try:
        with locked_indexes(new.database_url):
            process = started("restore", where, new, server.tools)
            until(lambda: server.waits("pg_restore"))
            kill(who, process, server)
    except psycopg.OperationalError:
        assert who == "server"
    assert_nothing_starts(new)
    with pytest.raises(BackupError, match="did not finish"):
        backup.restore(new, where)
    server.make_again(new.database_url)
    shutil.rmtree(new.artifacts)
    backup.restore(new, where)
    assert_restored(new, key)


def assert_restored(settings: Settings, key: str) -> None:
    opened = Database(settings.database)
    try:
        assert startup.refusal(settings, opened) is None
        with opened.read() as tx:
            query = "SELECT (SELECT count(*) FROM metrics), (SELECT count(*) FROM datasets)"
            assert tuple(tx.execute(database.text(query)).one()) == (NUM_STEPS, 1)
    finally:
        opened.close()
    files = sorted(path.name for path in (settings.artifacts / key).iterdir())
    assert files == ["train.npy", "validation.npy"]
    assert not (settings.artifacts / UNFINISHED).exists()


def test_a_restore_of_sqlite_that_is_killed_leaves_no_database(home: Path, tmp_path: Path):
    settings = Settings(home=home)
    key = filled(settings)
    where = tmp_path / "backup"
    backup.create(settings, where)
    new = Settings(home=tmp_path / "new")
    (new.home / "run").mkdir(parents=True)
    with (new.home / "run" / "migrate.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its last but one step waits
        process = started("restore", where, new, "")
        until(lambda: list(new.home.glob(".glasshouse.db.restoring/*")))
        until(lambda: _waits_for(process.pid, new.home / "run" / "migrate.lock"))
        process.kill()
        process.communicate()
    assert not (new.home / "glasshouse.db").exists()
    assert_nothing_starts(new)
    shutil.rmtree(new.artifacts)
    backup.restore(new, where)
    assert_restored(new, key)
    assert not list(new.home.glob(".glasshouse.db*"))


def _waits_for(pid: int, path: Path) -> bool:
    """Whether a process has opened a file: the next thing that it does is to lock it."""
    opened = Path(f"/proc/{pid}/fd").iterdir()
    return any(os.path.realpath(one) == str(path) for one in opened)


def test_what_is_deleted_while_it_is_copied_is_lost_as_a_whole(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The deletion comes after the first of two files was copied."""
    settings = Settings(home=home)
    key = filled(settings)
    copyfile = shutil.copyfile

    def copy_then_delete(source: Any, to: Any, **options: Any) -> Any:
        done = copyfile(source, to, **options)
        if Path(source).name == "train.npy":
            LocalArtifacts(settings.artifacts).delete(key)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", copy_then_delete)
        assert backup.create(settings, tmp_path / "backup")["lost"] == 1
    new = Settings(home=tmp_path / "new")
    backup.restore(new, tmp_path / "backup")
    assert not (new.artifacts / key).exists()
    opened = Database(new.database)
    with opened.read() as tx:
        assert tx.execute(database.text("SELECT count(*) FROM datasets")).scalar_one() == 0
    opened.close()


def test_of_a_directory_that_is_being_deleted_no_part_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Between two files of it: a copy that begins there would take the second for the whole."""
    store = LocalArtifacts(tmp_path / "store")
    made = tmp_path / "made"
    made.mkdir()
    for name in ("a", "b"):
        (made / name).write_text(name)
    store.put("checkpoints/one", made)
    remove, seen = os.unlink, []

    def look_then_remove(path: Any, **options: Any) -> None:
        remove(path, **options)
        try:
            seen.append(store.local("checkpoints/one"))
        except FileNotFoundError:
            seen.append(None)

    monkeypatch.setattr(os, "unlink", look_then_remove)
    store.delete("checkpoints/one")
    assert seen == [None, None]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_gigabyte_of_events_is_backed_up_and_restored(server: Server, home: Path, tmp_path: Path):
    settings = Settings(home=home, database_url=server.make())
    filled(settings)
    with psycopg.connect(connected(settings.database_url)) as connection:
        connection.execute(
            "INSERT INTO events (job, seq, attempt, at, type, step, payload) "
            "SELECT (SELECT id FROM jobs), n, 1, 0, 'metrics', n, "
            "json_build_object('epoch', n / 100, 'values', json_build_object('loss', random(), "
            "'grad_norm', random(), 'lr', random(), 'md5', md5(n::text)))::text "
            "FROM generate_series(1000, 6000000) AS n"
        )
        (size,) = connection.execute("SELECT pg_table_size('events')").fetchone() or (0,)
    assert size > 1e9
    where = tmp_path / "backup"
    new = Settings(home=tmp_path / "new", database_url=server.make())
    for action, of in (("create", settings), ("restore", new)):
        process = started(action, where, of, server.tools)
        said, _ = process.communicate(timeout=1200)
        assert process.returncode == 0, said
    digests = [_digest_of_events(one.database_url) for one in (settings, new)]
    assert digests[0] == digests[1]


def _digest_of_events(url: str) -> Any:
    query = "SELECT count(*), sum(hashtextextended(events::text, 0)::numeric) FROM events"
    with psycopg.connect(connected(url)) as connection:
        return connection.execute(query).fetchone()
