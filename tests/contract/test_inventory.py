"""The inventory of PaddlePaddle's documents: no row is missing, and what it names exists."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "inventory.md"
PARTS = {"A": 22, "B": 7, "C": 12, "D": 13, "E": 6, "F": 8, "G": 35, "H": 33}
"""Rows of each part; G has one between two others."""
EXPECTED = [f"{part}{number}" for part, most in PARTS.items() for number in range(1, most + 1)]
EXPECTED.insert(EXPECTED.index("G30") + 1, "G30a")
STATES = ("built", "in part", "not yet", "remark")


class Row(NamedTuple):
    name: str
    what: str
    here: str
    state: str
    test: str
    example: str


def rows() -> list[Row]:
    found = [
        Row(*(cell.strip() for cell in line.strip("|").split(" | ")))
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| [A-H]\d+a? \|", line)
    ]
    return [row._replace(test=row.test.strip("`")) for row in found]


@cache
def functions_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def test_every_row_is_there_once_and_in_order():
    assert sorted(row.name for row in rows()) == sorted(EXPECTED)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_the_tests_and_pages_of_a_row_exist(row: Row):
    assert row.state in STATES
    assert row.what
    if row.state in {"not yet", "remark"}:
        assert not row.test, "what is not there cannot be shown"
        return
    path, _, name = row.test.partition("::")
    assert name in functions_in(ROOT / "tests" / path), row.test
    example = re.fullmatch(r"\[[a-z-]+\]\(\.\./([a-z-]+/[a-z-]+\.md)\)", row.example)
    assert example is not None, row.example
    assert (ROOT / "docs" / example[1]).is_file()
    if row.state == "in part":
        assert len(row.here) > 20, "say what is missing"


def test_the_table_of_states_counts_the_rows():
    states = [row.state for row in rows()]
    for state in STATES:
        assert f"| {state} | {states.count(state)} |" in PAGE.read_text(), f"{state} has changed"
