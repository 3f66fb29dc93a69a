from pathlib import Path
from typing import Any

import pytest

from worker.attempt import logs
from worker.attempt.logs import Log, Logs, clean
from worker.processes.fork_server import STREAMS


def lines(log: Log, **options: Any) -> list[str]:
    found = log.read(**options)
    return [line for event in found if event.type == "log" for line in event.payload["lines"]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.stdout"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_log_gives_each_whole_line_once(path: Path):
    log = Log(path, "stdout")
    assert lines(log) == []
    append(path, b"one\ntwo\nthr")
    assert lines(log) == ["one", "two"]
    append(path, b"ee\n")
    assert lines(log) == ["three"]


def test_a_last_line_without_an_end_comes_at_the_end(path: Path):
    log = Log(path, "stdout")
    append(path, b"half")
    assert lines(log) == []
    assert lines(log, final=True) == ["half"]


def test_text_that_is_not_utf8_is_replaced():
    assert clean(b"a\xff\xfeb") == "a\ufffd\ufffdb"


def test_colors_and_control_characters_are_removed():
    assert clean(b"\x1b[31mred\x1b[0m \x1b]0;title\x07bell\x07\x00 tab\t.") == "red bell tab\t."
    assert clean("a\u202eb".encode()) == "ab"


def test_of_a_progress_bar_its_last_state_stays():
    assert clean(b" 10%\r 50%\r100%\r") == "100%"


def test_a_long_line_is_cut(path: Path):
    log = Log(path, "stdout")
    append(path, b"x" * 1_000_000 + b"\nshort\n")
    found = [line for _ in range(40) for line in lines(log)]
    assert [len(line) for line in found] == [logs.MAX_LINE_CHARACTERS, 5]


def test_a_rank_that_prints_without_end_does_not_fill_the_disk(path: Path):
    log = Log(path, "stderr")
    text = b"0123456789abcde\n" * 65536  # 1 MiB
    events: list[Any] = []
    printed = 0
    for number in range(12):
        more = text + b"last of %d\n" % number
        append(path, more)
        printed += len(more)
        events += log.read()
        assert path.stat().st_size <= logs.MAX_STREAM_BYTES
    events += log.read(final=True)
    dropped = sum(event.payload["count"] for event in events if event.type == "dropped")
    assert dropped == printed - logs.MAX_STREAM_BYTES
    tail = log.tail()
    assert tail is not None
    assert len(tail) <= 8192
    assert tail.endswith("last of 11")


def test_each_rank_has_its_lines_limits_and_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "MAX_STREAM_BYTES", 40)
    paths = {(rank, name): tmp_path / f"{rank}.{name}" for rank in (0, 2) for name in STREAMS}
    held = Logs([Log(path, name, rank) for (rank, name), path in paths.items()])
    append(paths[0, "stdout"], b"zero\n")
    append(paths[2, "stderr"], b"ERROR: two\n" + b"x" * 29 + b"\n" + b"lost\nlast\n")
    found = held.read(final=True)
    assert [event.payload for event in found] == [
        {"rank": 0, "stream": "stdout", "lines": ["zero"], "levels": ["info"]},
        {
            "rank": 2,
            "stream": "stderr",
            "lines": ["ERROR: two"],
            "levels": ["error"],
        },
        {"rank": 2, "stream": "stderr", "lines": ["x" * 29], "levels": ["info"]},
        {"what": "bytes of stderr of rank 2", "count": 11},
    ]
    assert held.tail(0) is None
    assert held.tail(2) == "ERROR: two\n" + "x" * 29 + "\nlost\nlast"
    assert held.tail() == held.tail(2)


def test_a_traceback_that_is_read_in_two_pieces_is_an_error(path: Path):
    log = Log(path, "stderr", 3)
    append(path, b"before\nTraceback (most recent call last):\n")
    append(path, b"  File")
    first = log.read()
    append(path, b" x\nKeyError: 1\nafter\n")
    levels = [level for event in (*first, *log.read()) for level in event.payload["levels"]]
    assert levels == ["info", "error", "error", "error", "info"]


def test_an_event_is_of_limited_size_at_the_end_too(path: Path):
    append(path, b"0123456789abcde\n" * 65536)
    events = Log(path, "stdout").read(final=True)
    assert len(events) == 16
    assert sum(len(event.payload["lines"]) for event in events) == 65536
    assert all(len(event.payload["lines"]) == len(event.payload["levels"]) for event in events)
