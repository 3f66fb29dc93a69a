"""Promises about the documentation's site: links hold, and nothing is loaded from elsewhere."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import absent

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READ = [*PAGES, *sorted(ROOT.glob("*.md"))]
FENCED = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*?\bsrc=["']?(?:https?:)?//|"""
    r"""<link\b[^>]*?\bhref=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import""",
    re.IGNORECASE,
)


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Of headings, as code hosts make them: small letters, no punctuation, a hyphen for a space."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in plain}


def links(page: Path) -> list[tuple[str, str]]:
    """Target and anchor of every link to something of ours."""
    found = [target.partition("#") for target in LINK.findall(prose(page))]
    return [(path, anchor) for path, _, anchor in found if "://" not in path]


def navigation(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from navigation(value if isinstance(value, list) else [value])


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_of_a_page_lead_somewhere(page: Path):
    for path, anchor in links(page):
        target = page.parent / path if path else page
        assert target.exists(), f"there is no {path}"
        assert not anchor or anchor in anchors(target), f"{path or page.name} has no #{anchor}"


def test_pages_of_the_site_link_to_nothing_outside_of_it():
    for page in PAGES:
        for path, _ in links(page):
            assert not path or DOCS in (page.parent / path).resolve().parents, f"{page}: {path}"


def test_the_changelog_has_no_links_as_the_site_shows_it_in_another_folder():
    assert not links(ROOT / "CHANGELOG.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_in_tables_has_no_pipe_which_the_site_and_code_hosts_show_differently(page: Path):
    for line in prose(page).splitlines():
        if line.startswith("|"):
            assert not [code for code in re.findall(r"`([^`]*)`", line) if "|" in code], line


def test_every_page_stands_in_the_navigation_once_and_single_errors_in_their_index():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = sorted(navigation(nav))
    pages = [str(page.relative_to(DOCS)) for page in PAGES]
    assert listed == sorted(
        page for page in pages if not page.startswith("errors/") or page == "errors/index.md"
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the site is made of."""
    if importlib.util.find_spec("zensical") is None:
        absent("the maker of the site (pip install zensical)")
    shutil.copytree(DOCS, tmp_path / "docs")
    for name in ("zensical.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=250
    )


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(copy: Path):
    done = build(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    site = copy / "build" / "site"
    for page in PAGES:
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists(), page
    assert not list(site.rglob("*.py"))
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not LOADED.search(file.read_text()), file
    search = (site / "search.json").read_text()
    assert "The flight recorder" in search
    assert "The public promises are the paths, fields, events and codes" in search


def test_a_link_to_a_missing_heading_breaks_the_site(copy: Path):
    with (copy / "docs" / "index.md").open("a") as page:
        page.write("\n[wrong](concepts/watching.md#nowhere)\n")
    done = build(copy)
    assert done.returncode != 0
    assert "anchor does not exist" in done.stdout + done.stderr
