"""The compose file cannot be started in CI; everything that it refers to can be checked."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {
    name: service
    for name, service in COMPOSE["services"].items()
    if str(service["image"]).startswith("glasshouse:")
}


def test_it_fits_the_schema_of_compose_files():
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.compose-spec", str(ROOT / "docker-compose.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(OURS))
@pytest.mark.long
def test_its_commands_exist(name: str):
    interpreter, flag, module, *options = OURS[name]["command"]
    assert (interpreter, flag) == ("python", "-m")
    found = importlib.util.find_spec(module)
    assert found is not None
    if found.submodule_search_locations is not None:
        assert importlib.util.find_spec(f"{module}.__main__") is not None
    if options:
        usage = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert all(option in usage for option in options if option.startswith("--"))


@pytest.mark.parametrize("name", sorted(OURS))
def test_its_variables_are_settings(name: str):
    known = {f"GLASSHOUSE_{field.upper()}" for field in Settings.model_fields}
    assert set(OURS[name]["environment"]) <= known


def test_its_health_check_asks_for_a_path_that_exists():
    program, flag, module, url = COMPOSE["services"]["api"]["healthcheck"]["test"][1:]
    assert (program, flag) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    path = re.sub(r"^http://127\.0\.0\.1:8420", "", url)
    sources = "".join(file.read_text() for file in (ROOT / "api").rglob("*.py"))
    assert f'"{path}"' in sources


def test_no_password_has_a_default():
    text = (ROOT / "docker-compose.yml").read_text()
    for variable in re.findall(r"\$\{([A-Z_]*PASSWORD)([^}]*)\}", text):
        assert variable[1].startswith(":?"), f"{variable[0]} must be required"
    example = (ROOT / ".env.example").read_text()
    assert all(line.endswith("=") for line in example.splitlines() if "PASSWORD=" in line)


def test_services_start_after_what_they_need():
    for name in ("api", "worker", "worker-gpu"):
        conditions = OURS[name]["depends_on"]
        assert conditions["migrate"]["condition"] == "service_completed_successfully"
        assert conditions["valkey"]["condition"] == "service_healthy"
    assert OURS["worker-gpu"]["profiles"] == ["gpu"]
    reserved = OURS["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert reserved[0]["capabilities"] == ["gpu"]


def test_the_image_holds_every_package_and_runs_as_nobody_special():
    text = (ROOT / "Dockerfile").read_text()
    allowed = (ROOT / ".dockerignore").read_text()
    for room in ("glasshouse", "engine", "models", "api", "worker", "migrations"):
        assert f"COPY {room} {room}" in text
        assert f"!{room}\n" in allowed
    assert "COPY pyproject.toml hatch_build.py" in text
    assert "!hatch_build.py\n" in allowed
    assert "COPY dashboard dashboard" in text
    assert "!dashboard\n" in allowed
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)


def test_only_the_image_for_cuda_has_a_compiler_when_it_runs():
    building, running = (ROOT / "Dockerfile").read_text().split("FROM python")[1:]
    assert "g++" in building
    assert "gcc" not in running
    assert '"postgresql-client-$POSTGRES_MAJOR" $PACKAGES' in running
    wanted = {name: service["build"]["args"].get("PACKAGES", "") for name, service in OURS.items()}
    assert wanted.pop("worker-gpu").split() == ["gcc", "libc6-dev"]
    assert set(wanted.values()) == {""}


def test_the_image_has_the_client_programs_of_the_server_and_the_traces():
    text = (ROOT / "Dockerfile").read_text()
    (major,) = re.findall(r"^ARG POSTGRES_MAJOR=(\d+)$", text, re.MULTILINE)
    assert COMPOSE["services"]["postgres"]["image"] == f"postgres:{major}"
    assert "'.[server,tracing]'" in text


def test_a_host_has_one_worker():
    """Two would lease the same cores; none would leave every job waiting."""
    profiles = {name: service["profiles"] for name, service in OURS.items() if "worker" in name}
    assert profiles == {"worker": ["cpu"], "worker-gpu": ["gpu"]}
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env.example").read_text().splitlines()
    (wanted,) = OURS["api"]["labels"].values()
    assert wanted.startswith("${COMPOSE_PROFILES:?")


def test_every_process_that_stays_has_a_health_check_and_gets_its_signals():
    for name, service in COMPOSE["services"].items():
        assert ("healthcheck" in service) == (name != "migrate"), name
    assert all(service["init"] for service in OURS.values())
    assert re.search(r'^CMD \["', (ROOT / "Dockerfile").read_text(), re.MULTILINE)


def test_work_is_on_the_volume_of_the_artifacts():
    for service in OURS.values():
        (volume,) = service["volumes"]
        place = volume.partition(":")[2]
        variables = service["environment"]
        settings = Settings(
            home=variables["GLASSHOUSE_HOME"], work_dir=variables["GLASSHOUSE_WORK_DIR"]
        )
        assert settings.artifacts == Path(place)
        assert settings.work.is_relative_to(place)
