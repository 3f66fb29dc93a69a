"""What importing costs, and what the client must not touch."""

import subprocess
import sys
import tomllib
from pathlib import Path

import glasshouse

ROOT = Path(glasshouse.__file__).parents[1]


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_importing_loads_nothing_heavy():
    loaded = run("import sys, glasshouse; print(*sys.modules)").split()
    heavy = {"torch", "numpy", "httpx2", "pydantic", "rich", "typer"}
    assert heavy.isdisjoint(name.partition(".")[0] for name in loaded)


def test_the_client_loads_neither_torch_nor_the_service():
    code = "import sys, glasshouse; glasshouse.Client; import glasshouse.cli; print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in run(code).split()}
    server = {"torch", "models", "api", "worker", "engine", "celery", "sqlalchemy", "fastapi"}
    assert server.isdisjoint(loaded)


def test_importing_takes_under_0_3_s_of_a_processor():
    code = "import time; t = time.process_time(); import glasshouse; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.3


def test_every_exported_name_exists_and_is_sorted():
    assert list(glasshouse.__all__) == sorted(glasshouse.__all__)
    for name in glasshouse.__all__:
        assert getattr(glasshouse, name) is not None
    assert not hasattr(glasshouse, "nothing_of_this_name")


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert glasshouse.__version__ == project["project"]["version"]
