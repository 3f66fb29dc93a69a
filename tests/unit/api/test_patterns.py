"""Patterns from the network: matched in linear time, and explained if they are wrong."""

import re
import threading
import time

import pytest

from api.http.patterns import compiled
from api.http.times import time_of
from glasshouse.errors import InvalidRequest
from models.tables import now

WRONG = [
    ("a(b", "missing )", 1),
    ("((a)", "missing )", 0),
    ("a[()](b(c)", "missing )", 5),
    (r"\((b", "missing )", 2),
    ("a)b", "unexpected )", 1),
    ("éé[", "missing ]", 2),
    ("[]a", "missing ]", 0),
    ("*a", "no argument for repetition operator", 0),
    (r"\*a|*", "no argument for repetition operator", 4),
    ("a**", "bad repetition operator", 1),
    ("a{1001}", "invalid repetition size", 1),
    ("(a{1000}){1000}", "invalid repetition size", 9),
    ("x{2,1}", "invalid repetition size", 1),
    ("x(?=a)", "invalid perl operator", 1),
    ("(?<=a)b", "invalid perl operator", 0),
    ("(?z)a", "invalid perl operator", 0),
    (r"x\1", "invalid escape sequence", 1),
    (r"\\q\q", "invalid escape sequence", 3),
    (r"a\Z", "invalid escape sequence", 1),
    ("a\\", "trailing \\", 1),
    ("(?P<n", "invalid named capture group", 0),
    ("ab[z-a]", "invalid character class range", 3),
    (r"a\pX", "invalid character class range", 1),
]


@pytest.mark.parametrize(("pattern", "kind", "position"), WRONG)
def test_a_wrong_pattern_is_explained(pattern: str, kind: str, position: int):
    with pytest.raises(InvalidRequest) as caught:
        compiled("grep", pattern)
    (problem,) = caught.value.problems
    assert (problem.pointer, problem.code) == ("/query/grep", "invalid_pattern")
    said = re.fullmatch(rf"{re.escape(kind)}.* at position (\d+) \(.*; (.*)\.", problem.detail)
    assert said is not None, problem.detail
    assert int(said[1]) == position
    assert "http" not in said[2], "no fix is known"


def test_a_pattern_may_not_be_large():
    with pytest.raises(InvalidRequest, match=r"too large.*fewer"):
        compiled("grep", r"\pL{1000}")
    assert compiled("grep", r"(?i)\pL{10}")("größereWelt".encode())


def test_matching_is_linear_and_lets_others_run():
    gaps: list[float] = []
    over = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not over.wait(0.001):
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    ticking = threading.Thread(target=tick)
    search = compiled("grep", "(?:" + "a?" * 32 + "){400}b")  # a second: the slowest that is taken
    ticking.start()
    assert not search(b"a" * 4096)
    over.set()
    ticking.join()
    assert len(gaps) >= 5  # none, if the interpreter were held
    assert not compiled("grep", "(a+)+$")(b"a" * 4096 + b"!")


def test_a_time_without_a_zone_is_utc_and_a_plus_may_be_a_space():
    hour = time_of("since", "2026-11-25T10:00:00", now())
    assert hour == time_of("since", "2026-11-25T10:00:00Z", now())
    assert hour == time_of("since", "2026-11-25 10:00", now())
    assert hour == time_of("since", "2026-11-25T12:00:00+02:00", now())
    assert hour == time_of("since", "2026-11-25T12:00:00 02:00", now())
    at = now()
    assert (at - time_of("since", "1w1d1h1m1s", at)).total_seconds() == 694861


@pytest.mark.parametrize(
    "text", ["", "x", "10", "٣m", "9" * 9 + "w", "0001-01-01T00:00:00+05:00", "1h ", "m"]
)
def test_what_is_no_time_is_refused(text: str):
    with pytest.raises(InvalidRequest, match=r"since.*2h30m"):
        time_of("since", text, now())
