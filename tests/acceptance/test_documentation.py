"""What the documentation shows is what happens: its blocks run against a real service."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.acceptance.services import ROOT, LocalService

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 250.0


@dataclass(frozen=True)
class Block:
    """Some code of a page."""

    page: Path
    number: int
    language: str
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.number}"


def blocks(language: str) -> list[Block]:
    """Every block of a language, numbered by its line."""
    return [
        Block(page, 1 + text.count("\n", 0, found.start()), found[1], found[2].strip(), found[3])
        for page in PAGES
        for text in [page.read_text()]
        for found in BLOCK.finditer(text)
        if found[1] == language
    ]


def pages_with_python() -> list[Path]:
    return sorted({block.page for block in blocks("python") if not block.info})


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A directory with what the pages use of the repository."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def address_of(service: LocalService) -> dict[str, str]:
    """The variables that name a service."""
    return {"GLASSHOUSE_URL": service.url, "GLASSHOUSE_API_KEY": service.key}


def run(command: list[str], copy: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@pytest.mark.parametrize("page", pages_with_python(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, local_service: LocalService, copy: Path
):
    code = [block.text for block in blocks("python") if block.page == page and not block.info]
    environment = local_service.environment | address_of(local_service)
    environment |= {"PYTHONPATH": str(ROOT)}
    run([sys.executable, "-W", "error", "-c", "\n".join(code)], copy, environment)


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_the_shell_commands_of_a_page_run(block: Block, local_service: LocalService, copy: Path):
    environment = local_service.environment | address_of(local_service)
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    said = run(["bash", "-euo", "pipefail", "-c", block.text], copy, environment)
    assert '"code"' not in said, said
    if block.page.name == "README.md":
        assert "event: end" in said
        assert '"state":"succeeded"' in said
        assert (copy / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_the_json_of_a_page_is_json(block: Block):
    json.loads(block.text)


def test_code_that_is_not_run_says_why():
    for block in blocks("python"):
        assert not block.info or re.fullmatch(r"notest: .{10,}", block.info), str(block)


def test_the_readme_shows_python_and_curl():
    shown = {block.language for block in [*blocks("python"), *blocks("bash")]}
    pages = {block.page.name for block in blocks("bash")}
    assert shown == {"python", "bash"}
    assert "README.md" in pages
