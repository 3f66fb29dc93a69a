"""What the doctor finds on the host of a service, and what it says to do about it."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from glasshouse.cli.service.doctor import FIX_READY
from glasshouse.cli.service.processes import ROOT
from models.access import webhooks
from models.database import Database
from models.fleet import workers
from models.migrate import migrate
from models.settings import Settings
from models.storage.disk_space import remote_kind
from models.tables import Webhook, Worker, now


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a database, and a worker and a webhook in it."""
    settings = Settings(home=tmp_path)
    database = Database(settings.database)
    migrate(database, lock_file=tmp_path / "migrate.lock")
    with database.write() as tx:
        workers.register(tx, worker="w1", host="h", pid=1, version="0", info={}, devices=[])
        webhooks.add(tx, owner="ada", url="https://example.org/", events=(), labels={})
    database.close()
    return tmp_path


def findings(home: Path, **variables: str) -> dict[str, dict[str, str]]:
    """By name, what is not well; what is well only by its name."""
    more = {f"GLASSHOUSE_{name}": value for name, value in variables.items()}
    done = subprocess.run(
        [sys.executable, "-m", "models.check"],
        env=os.environ | {"GLASSHOUSE_HOME": str(home)} | more,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {found["name"]: found for found in json.loads(done.stdout)}


def test_a_service_that_is_well_has_no_complaints(home: Path):
    found = findings(home, MIN_FREE_BYTES="0")
    assert {one["state"] for one in found.values()} == {"ok"}
    assert {"space", "revision", "integrity"} <= set(found)


def test_a_setting_that_cannot_be_read_is_named(home: Path):
    found = findings(home, LEASE_S="soon")
    assert found["settings"]["state"] == "fail"
    assert "GLASSHOUSE_LEASE_S" in found["settings"]["detail"]
    assert "GLASSHOUSE_LEASE_S" in found["settings"]["fix"]


def test_null_in_a_setting_means_forever(home: Path):
    assert "settings" not in findings(home, KEEP_KEYS_DAYS="null", KEEP_EVENTS_DAYS="7")


def test_too_little_space_says_what_can_go(home: Path):
    found = findings(home, MIN_FREE_BYTES=str(10**18))["space"]
    assert found["state"] == "fail"
    assert "glasshouse purge --dry-run" in found["fix"]


def test_a_database_of_another_version_is_reported(home: Path):
    with closing(sqlite3.connect(home / "glasshouse.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
        connection.commit()
    found = findings(home)["revision"]
    assert found["state"] == "fail"
    assert "0001" in found["detail"]
    assert "glasshouse migrate" in found["fix"]


def test_a_damaged_database_is_reported(home: Path):
    path = home / "glasshouse.db"
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'ix_events_job' OR name = 'jobs'"
        ).fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(path.read_bytes())
    start = (root - 1) * 4096
    data[start : start + 100] = b"\xff" * 100
    path.write_bytes(data)
    found = findings(home)
    assert found.get("integrity", found.get("database"))["state"] == "fail"


def test_an_unresponsive_worker_and_a_webhook_that_is_off_are_reported(home: Path):
    database = Database(Settings(home=home).database)
    with database.write() as tx:
        tx.execute(update(Worker).values(canary_ms=Worker.canary_ms - 100_000))
        past = now() - timedelta(days=1)
        tx.execute(update(Webhook).values(disabled_at=past, disabled_reason="r"))
    database.close()
    found = findings(home)
    assert found["unresponsive"]["state"] == "fail"
    assert "w1" in found["unresponsive"]["detail"]
    assert found["webhooks"]["state"] == "warn"


def test_every_check_of_readiness_can_be_fixed():
    from api.app_state import make_resources
    from api.routes.service.readiness import Readiness

    app_state = make_resources(Settings(home=Path("/nonexistent"), artifacts_dir=Path("/tmp")))  # noqa: S108
    assert set(Readiness(app_state)._checks) <= set(FIX_READY)
    app_state.notifier.close()
    app_state.database.close()


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/srv/share/home", "nfs4"),
        ("/srv/share", "nfs4"),
        ("/srv/sharedhome", None),
        ("/srv/share/local/x", None),
        ("/mnt/a b/x", "fuse.sshfs"),
    ],
)
def test_a_network_file_system_is_known_by_the_mount_that_is_nearest(place: str, kind: str | None):
    mounts = [
        "/dev/sda1 / ext4 rw 0 0",
        "server:/x /srv/share nfs4 rw 0 0",
        "/dev/sdb1 /srv/share/local ext4 rw 0 0",
        "me@there: /mnt/a\\040b fuse.sshfs rw 0 0",
    ]
    assert remote_kind(Path(place), mounts) == kind
