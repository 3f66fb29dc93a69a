"""Failpoints: nothing when off, and exactly what a rule says when on."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glasshouse import failpoints
from glasshouse.failpoints import Failpoints

ROOT = Path(__file__).parents[3]


def test_without_the_variable_a_point_is_an_empty_function():
    assert failpoints.chosen({}) is failpoints.chosen({"FAILPOINTS": ""})
    assert failpoints.chosen({})("any") is None


def test_a_rule_is_followed_at_its_hit_and_at_no_other():
    points = Failpoints("a.b=raise@3; c.d=raise")
    points("a.b")
    points("a.b")
    points("other")
    with pytest.raises(OSError, match=r"a\.b"):
        points("a.b")
    points("a.b")
    with pytest.raises(OSError, match=r"c\.d"):
        points("c.d")


def test_a_rule_is_followed_once_by_all_processes_together(tmp_path: Path):
    first, second = (Failpoints("a=raise@2", tmp_path) for _ in range(2))
    first("a")
    second("a")
    with pytest.raises(OSError, match="a"):
        first("a")
    second("a")


def test_a_pause_lasts_as_long_as_it_says():
    began = time.monotonic()
    Failpoints("a=pause:0.05")("a")
    assert time.monotonic() - began >= 0.05


def test_a_killed_process_does_not_come_past_the_point():
    code = "import glasshouse.failpoints as f; print(1, flush=True); f.failpoint('a'); print(2)"
    environment = os.environ | {"FAILPOINTS": "a=kill", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (-9, b"1\n")


@pytest.mark.parametrize("rule", ["a", "a=die", "=kill", "a=kill@x", "a=pause:x"])
def test_an_invalid_rule_is_refused(rule: str):
    with pytest.raises(ValueError, match=r"form|invalid|convert"):
        Failpoints(rule)


def test_the_table_names_every_point_and_no_other():
    code: set[str] = set()
    for room in ("api", "engine", "models", "worker"):
        for path in (ROOT / room).rglob("*.py"):
            code |= set(re.findall(r'failpoint\("([a-z_.]+)"\)', path.read_text()))
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("**Failpoints.**") : text.index("**Speed.**")]
    told = {name for line in table.splitlines() if line.startswith("| ")
            for name in re.findall(r"`([a-z_]+\.[a-z_]+)`", line)}  # fmt: skip
    assert told == code
    assert len(code) >= 40
