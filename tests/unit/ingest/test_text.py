"""Plain text as a dataset, and the tokens that are counted of every column of texts."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from engine.datasets import writer
from engine.datasets.column_stats import Budget, TokenCounts
from tests.unit.ingest.conftest import Ingesting

TEXT = "First Citizen:\r\nSpeak, speak.\n\nÜber alles: 你好\nno end"
LINES = ["First Citizen:", "Speak, speak.", "", "Über alles: 你好", "no end"]


def test_a_line_is_a_row_and_empty_lines_are_too(ingesting: Ingesting):
    found = ingesting("text", TEXT.encode())
    assert found.meta["splits"] == {"all": 5}
    assert found.texts("all", "text") == LINES
    again = ingesting("text", b"\xef\xbb\xbf" + TEXT.encode() + b"\n")
    assert again.texts("all", "text") == LINES


@pytest.mark.parametrize("unit", ["characters", "words"])
def test_tokens_are_counted_when_a_column_is_read(ingesting: Ingesting, unit: str):
    rows = [{"text": line} for line in LINES * 3]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    found = ingesting("jsonl", content).meta["columns"][0]["tokens"][unit]["all"]
    tokens = [line.split() if unit == "words" else list(line) for line in LINES * 3]
    lengths = [len(row) for row in tokens]
    counts = Counter(token for row in tokens for token in row)
    assert (found["min"], found["max"], found["total"]) == (0, max(lengths), sum(lengths))
    times = range(1, min(20, max(counts.values())) + 1)
    assert found["at_least"] == [
        sum(count >= least for count in counts.values()) for least in times
    ]


def test_columns_of_numbers_count_no_tokens(ingesting: Ingesting):
    columns = ingesting("csv", b"a,b\n1,x\n2,y z\n").meta["columns"]
    assert "tokens" not in columns[0]
    assert columns[1]["tokens"]["words"]["all"]["total"] == 3


def test_more_tokens_than_there_is_room_for_are_not_distinguished():
    budget = Budget(10)
    first, second = (TokenCounts(budget, str.split) for _ in range(2))
    first.update(["a b c", "d e f g h"])
    second.update(["a b", "c"])
    found = second.as_dict()
    assert (found["at_least"], found["total"], found["max"]) == (None, 3, 2)
    assert first.as_dict()["at_least"] == [8]
    assert budget.left == 2
    assert writer.MAX_TOKENS >= 300_000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"good\n\xff\xfe bad", "line 2, byte 1 is not UTF-8"),
        (b"a\0b", "line 1 holds a NUL byte"),
        (b"\xff\xfea\0", "the file is UTF-16"),
        (b"x" * (9 << 20), "line 1: the row is larger than 8,388,608 bytes"),
    ],
)
def test_invalid_text_is_refused(ingesting: Ingesting, content: bytes, says: str):
    assert says in ingesting.problem("text", content)


@pytest.mark.long
def test_a_long_text_takes_little_memory(ingesting: Ingesting):
    content = b"the quick brown fox jumps over the lazy dog\n" * 400_000
    done = ingesting.process("text", ingesting.file(content))
    assert done["answer"]["meta"]["splits"] == {"all": 400_000}
    assert done["peak_bytes"] < 96 << 20


def test_reading_text_does_not_import_what_images_need():
    code = "import sys, engine.datasets.ingest;"
    code += "print([m for m in ('torch', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"
