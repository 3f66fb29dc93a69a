"""The documents name files that exist, and each package says what is in it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "engine", "glasshouse", "models", "worker")
BUILT = {"api/page_files/"}  # only in a wheel
PATH = re.compile(
    r"`((?:api|bench|dashboard|docs|engine|examples|glasshouse|migrations|models|tests|worker)/"
    r"[\w./-]+)`"
)
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if path.name != "CHANGELOG.md"  # names files as they were
)


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_page_names_exist(page: str):
    named = set(PATH.findall((ROOT / page).read_text())) - BUILT
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_each_package_has_a_docstring():
    files = [file for name in PACKAGES for file in (ROOT / name).rglob("__init__.py")]
    assert len(files) > 50
    silent = [file for file in files if not ast.get_docstring(ast.parse(file.read_text()))]
    assert silent == []
