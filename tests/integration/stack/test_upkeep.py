"""Upkeep by the command line, of the service that ``glasshouse up`` runs."""

import json
from pathlib import Path

from tests.integration.stack.conftest import RunningStack, command


def test_a_running_service_is_backed_up_and_restored_into_another_home(
    running: RunningStack, tmp_path: Path
):
    where = tmp_path / "backup"
    done = command(running.home, "backup", str(where), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["lost"] == 0
    again = command(running.home, "backup", str(where))
    assert again.returncode == 1
    assert "not empty" in again.stderr
    here = command(running.home, "restore", str(where))
    assert here.returncode == 1
    assert "restore into a new home" in here.stderr
    new = tmp_path / "new"
    restored = command(running.home, "restore", str(where), "--home", str(new), "--json")
    assert restored.returncode == 0, restored.stderr
    assert (new / "glasshouse.db").stat().st_mode & 0o077 == 0


def test_a_dry_run_of_the_purge_deletes_nothing(running: RunningStack):
    with running.client() as client:
        before = [job.id for job in client.jobs.list()]
    done = command(running.home, "purge", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dry_run"] is True
    with running.client() as client:
        assert [job.id for job in client.jobs.list()] == before


def test_a_webhook_is_made_listed_and_removed(running: RunningStack):
    url = "https://example.org/hook"
    done = command(running.home, "webhooks", "add", url, "--event", "job.failed", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    listed = command(running.home, "webhooks", "list")
    assert made["id"] in listed.stdout
    assert made["secret"] not in listed.stdout
    sent = command(running.home, "webhooks", "deliveries", made["id"], "--json")
    assert json.loads(sent.stdout) == []
    assert command(running.home, "webhooks", "remove", made["id"]).returncode == 0
    assert json.loads(command(running.home, "webhooks", "list", "--json").stdout) == []
    assert made["secret"] not in (running.home / "logs" / "api.log").read_text()


def test_status_reports_the_warnings_and_doctor_of_every_check(running: RunningStack):
    done = command(running.home, "doctor", "--json")
    names = {check["name"] for check in json.loads(done.stdout)}
    assert {"space", "revision", "integrity"} <= names
    told = json.loads(command(running.home, "status", "--json").stdout)
    assert {"database", "database_write", "broker", "workers", "sweepers", "disk"} <= set(
        told["checks"]
    )
    assert told["status"] == "ok"
    assert "broker_version" not in told["warnings"]
