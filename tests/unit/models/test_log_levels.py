"""The levels of printed lines, as the libraries that print them write them."""

import subprocess
import sys
import time

import pytest

from glasshouse.events import LogLevel
from models.observations.log_levels import LevelReader, levels_of

STATED: list[tuple[LogLevel, str]] = [
    ("info", "INFO:root:hello"),
    ("debug", "DEBUG:a.b:hello"),
    ("error", "CRITICAL:x:hello"),
    ("error", "2026-11-25 10:00:00,123 ERROR hello"),
    ("warning", "2026-11-25 10:00:00,000 - my.name - WARNING - hello"),
    ("warning", "[2026-11-25 10:00:00,123][torch.distributed][WARNING] hello"),
    ("warning", "[2026-11-25 10:00:00,123] torch.distributed.run: [WARNING] hello"),
    ("warning", "2026-11-25T10:00:00.123Z [warning  ] event x=1"),
    ("warning", "2026-11-25 10:00:00.123 | WARNING  | module:function:12 - hello"),
    ("warning", "2026/11/25 10:00:00 WARNING mlflow.utils: hello"),
    ("warning", "[10:00:00] WARNING  hello  file.py:3"),
    ("warning", "[WARNING|logging.py:328] 2026-11-25 10:00:00,123 >> hello"),
    ("error", "my.name - ERROR - hello"),
    ("warning", "W1125 10:00:00.000000 123 file.cpp:1] text"),
    ("warning", "[rank0]:W1125 10:00:00.000000 123 torch/_dynamo/x.py:1] [0/0] text"),
    ("warning", "[rank0]:[W1125 10:00:00.123456789 ProcessGroupNCCL.cpp:1250] Warning: text"),
    ("warning", "[W ProcessGroupNCCL.cpp:1] text"),
    ("error", "E20261125 10:00:00.0 1 a.cc:1] text"),
    ("error", "F1125 10:00:00.0 1 a.cc:1] text"),
    ("debug", "V1125 10:00:00.000000 1 x.py:3] text"),
    ("info", "host:12:34 [0] NCCL INFO Channel 00"),
    ("warning", "[2026-11-25 10:00:00] host:12:34 [0] misc/socket.cc:50 NCCL WARN Net"),
    ("warning", '{"event": "x", "level": "warning", "a": 1}'),
    ("error", '{"severity":"ERROR","message":"x"}'),
    ("warning", "UserWarning: hello"),
    ("warning", "/a/b c/d.py:12: torch.jit.TracerWarning: hello"),
    ("error", "torch.OutOfMemoryError: CUDA out of memory"),
    ("error", "glasshouse.errors.run.DataFailed: row 0 of split 'train' has 1 in column 'y'"),
    ("error", "terminate called after throwing an instance of 'c10::Error'"),
    ("info", ""),
    ("info", "information about it"),
    ("info", "Information: nothing"),
    ("info", "epoch 1 error: 0.5"),
    ("info", "Mean Error: 0.2"),
    ("info", "ERRORS 3"),
    ("info", "2026-11-25 10:00:00 epoch 3 without a warning or ERROR at its end"),
    ("info", "    indented"),
]


@pytest.mark.parametrize(("level", "line"), STATED)
def test_a_line_has_the_level_that_it_states(level: LogLevel, line: str):
    assert LevelReader().level(line) == level


BLOCK = """\
epoch 1
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    f()
    ~^^
RuntimeError: Error(s) in loading state_dict:
\tsize mismatch for fc.weight

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "x.py", line 2, in <module>
module.Thing
epoch 2
/a.py:3: UserWarning: old
  warnings.warn("old")
epoch 3
[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 3
[rank1]: KeyError: 1
[rank1]: done
"""


def test_a_traceback_is_an_error_until_it_ends():
    lines = BLOCK.splitlines()
    found = LevelReader().levels(lines)
    info = [line for line, level in zip(lines, found, strict=True) if level == "info"]
    assert info == ["epoch 1", "epoch 2", "epoch 3", "[rank1]: done"]
    assert [lines[place] for place, level in enumerate(found) if level == "warning"] == lines[14:16]


def test_a_block_may_be_read_in_pieces():
    lines = BLOCK.splitlines()
    reader = LevelReader()
    pieces = [level for line in lines for level in reader.levels([line])]
    assert pieces == LevelReader().levels(lines)


def test_levels_are_those_that_python_prints():
    code = (
        "import logging, warnings; logging.basicConfig(level=0)\n"
        "for level in (10, 20, 30, 40, 50): logging.log(level, 'hello')\n"
        "warnings.warn('old')\n"
        "try: 1 / 0\n"
        "except Exception: logging.exception('failed')\n"
        "print('after', file=__import__('sys').stderr)\n"
        "int('x')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    found = dict(zip(lines, LevelReader().levels(lines), strict=True))
    assert [found[f"{name}:root:hello"] for name in ("DEBUG", "INFO", "WARNING", "ERROR")] == [
        "debug",
        "info",
        "warning",
        "error",
    ]
    assert found["CRITICAL:root:hello"] == "error"
    assert found["<string>:3: UserWarning: old"] == "warning"
    after = lines.index("after")
    failed = lines.index("ERROR:root:failed")
    levels = LevelReader().levels(lines)
    assert set(levels[failed:after]) == {"error"}
    assert levels[after] == "info"
    assert set(levels[after + 1 :]) == {"error"}


def test_events_without_levels_get_those_of_their_lines():
    assert levels_of({"lines": ["a", "ERROR: b"]}) == ["info", "error"]
    assert levels_of({"lines": ["a"], "levels": ["debug"]}) == ["debug"]
    assert levels_of({"lines": ["a", "b"], "levels": ["debug"]}) == ["info", "info"]


@pytest.mark.parametrize(
    "piece", ["a.", '{"', "x:1: ", "[ ", "2026-11-25 10:00:00 - ", " ", "1:", "Error"]
)
def test_no_line_takes_long(piece: str):
    line = piece * (4096 // len(piece))
    began = time.process_time()
    for _ in range(100):
        LevelReader().level(line)
    assert time.process_time() - began < 10  # 5 ms; with backtracking over the line: minutes
