"""The page is built once for each state of its sources; without Node nothing breaks."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import absent

ROOT = Path(__file__).parents[2]
ROOMS = ("glasshouse", "engine", "models", "api", "worker", "migrations", "docs/errors")


@pytest.fixture(scope="module")
def packages() -> Path:
    """The npm packages of this checkout."""
    found = ROOT / "dashboard" / "node_modules"
    if not (found / "esbuild").is_dir():
        absent("The page's packages (make page)")
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in which the page was not built, and has no packages."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy / name)
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "node_modules", "dist", ".node")
    for name in (*ROOMS, "dashboard"):
        shutil.copytree(ROOT / name, copy / name, ignore=skipped)
    return copy


@pytest.fixture
def furnished(tree: Path, packages: Path) -> Path:
    """The same with its packages, so that none is fetched."""
    (tree / "dashboard" / "node_modules").symlink_to(packages)
    return tree


def build(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "dashboard/build.py", *arguments],
        cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def wheel(tree: Path, out: Path, **environment: str) -> tuple[Path, str]:
    """Build a wheel; the wheel and what was said.

    Without the kernel, to compile which takes longer than all else: ``test_kernel.py`` does.
    """
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out],
        cwd=tree, env={**os.environ, "CXX": "none", **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return next(out.glob("*.whl")), done.stderr


def without_node(tmp_path: Path) -> dict[str, str]:
    """An environment with no Node on the path and no index of packages."""
    return {"PATH": str(tmp_path / "nothing"), "PIP_NO_INDEX": "1"}


@pytest.mark.long
def test_it_is_built_once_for_each_state_of_its_sources(furnished: Path):
    first = build(furnished)
    assert (first.returncode, first.stdout) == (0, "the dashboard is built\n"), first.stderr
    dist = furnished / "dashboard" / "dist"
    built = (dist / "index.html").stat().st_mtime_ns
    assert build(furnished).stdout == "the dashboard is up to date\n"
    assert (dist / "index.html").stat().st_mtime_ns == built
    (furnished / "dashboard" / "src" / "api" / "schema.gen.ts").write_text("// types only\n")
    assert build(furnished).stdout == "the dashboard is up to date\n"
    template = furnished / "dashboard" / "index.html"
    template.write_text(template.read_text().replace("<title>", "<title>Another "))
    assert build(furnished).stdout == "the dashboard is built\n"
    assert "<title>Another " in (dist / "index.html").read_text()


def test_a_source_that_is_wrong_is_reported_and_leaves_no_stamp(furnished: Path):
    (furnished / "dashboard" / "src" / "main.tsx").write_text("import nothing from './nowhere';\n")
    failed = build(furnished)
    assert failed.returncode == 1
    assert failed.stderr.startswith("glasshouse: no dashboard: npm run --silent build failed: ")
    assert "Could not resolve" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    assert build(furnished, "--try").returncode == 0
    assert not (furnished / "dashboard" / "dist" / ".sources").exists()


@pytest.mark.long
def test_a_wheel_holds_the_page_and_serves_it(furnished: Path, tmp_path: Path):
    made, _ = wheel(furnished, tmp_path / "out")
    zipfile.ZipFile(made).extractall(tmp_path / "site")
    names = zipfile.ZipFile(made).namelist()
    assert not [name for name in names if name.startswith("dashboard/") or "node_modules" in name]
    assert not [name for name in names if name.startswith("api/page_files/.")]
    code = (
        "import re\n"
        "from api.http.dashboard import find_page\n"
        "page = find_page()\n"
        "index = page.index().body.decode()\n"
        "scripts = re.findall(r'/assets/([^\"]+)', index)\n"
        "assert scripts and all(page.asset(name) for name in scripts), index\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "site", check=True)


@pytest.mark.long
def test_without_node_a_wheel_is_made_and_one_line_says_what_it_lacks(tree: Path, tmp_path: Path):
    made, said = wheel(tree, tmp_path / "out", **without_node(tmp_path))
    (line,) = [line for line in said.splitlines() if "no dashboard" in line]
    assert "no Node 20 or newer with npm on the path" in line
    assert not [name for name in zipfile.ZipFile(made).namelist() if "page_files" in name]
    asked = build(tree, **without_node(tmp_path))
    assert asked.returncode == 1
    assert asked.stderr.strip() == line.strip()


def test_a_node_that_is_too_old_is_not_used(tree: Path, tmp_path: Path):
    old = tmp_path / "old"
    old.mkdir()
    for name, said in (("node", "v18.20.0"), ("npm", "11.0.0")):
        (old / name).write_text(f"#!/bin/sh\necho {said}\n")
        (old / name).chmod(0o755)
    failed = build(tree, PATH=str(old), PIP_NO_INDEX="1")
    assert failed.returncode == 1
    assert "no Node 20 or newer" in failed.stderr


@pytest.mark.long
def test_a_wheel_without_the_pages_sources_is_made(tree: Path, tmp_path: Path):
    shutil.rmtree(tree / "dashboard")
    _, said = wheel(tree, tmp_path / "out")
    assert "no dashboard: its sources are not here" in said


def test_the_lock_file_names_every_package_by_its_digest_and_none_by_its_address():
    lock = json.loads((ROOT / "dashboard" / "package-lock.json").read_text())
    root, *packages = lock["packages"].items()
    assert root[0] == ""
    assert len(packages) > 20
    for path, package in packages:
        assert package["integrity"].startswith("sha512-"), path
        assert "resolved" not in package, path
