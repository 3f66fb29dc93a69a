"""Whether the first row of a table of texts names its columns: shapes of files that people have."""

import csv
import io
from collections.abc import Iterable
from typing import Any

import pytest

from engine.datasets.readers.delimited import is_name
from glasshouse.errors import InvalidDataset
from models.storage.columns import DatasetColumns
from tests.unit.ingest.conftest import Ingesting

WITH_HEADER: dict[str, tuple[list[str], list[list[str]]]] = {
    "sentiment": (
        ["text", "sentiment"],
        [["a fine film", "positive"], ["dull", "negative"], ["I laughed", "positive"]],
    ),
    "label first": (["label", "sms"], [["ham", "Go until jurong point"], ["spam", "Free entry"]]),
    "titles of several words": (
        ["Review Text", "Star Rating (words)"],
        [["Lovely, would buy again!", "five"], ["Broke.", "one"]],
    ),
    "snake case and dots": (
        ["Sepal.Length", "petal_width", "class-name"],
        [["short", "wide", "setosa"], ["long", "wide", "virginica"]],
    ),
    "names without any repetition": (
        ["country", "capital"],
        [["France", "Paris"], ["Germany", "Berlin"], ["Italy", "Rome"]],
    ),
    "an index without a name": (["", "text", "label"], [["a", "x y", "p"], ["b", "z", "n"]]),
    "other alphabets": (["текст", "类别"], [["хорошо", "да"], ["плохо", "нет"]]),
    "one column": (["word"], [["alpha"], ["beta"], ["gamma"]]),
    "empty cells below": (["text", "label"], [["good", ""], ["", "n"], ["bad", "n"]]),
    "a column that is empty": (["text", "label", "notes"], [["good", "p", ""], ["bad", "n", ""]]),
    "one row": (["question", "answer"], [["Why?", "Because."]]),
    "dates and ids": (
        ["when", "id", "mail"],
        [["2024-01-01", "a1", "a@b.org"], ["2024-01-02", "a2", "c@d.org"]],
    ),
}
WITHOUT: dict[str, tuple[list[list[str]], str]] = {
    "sentences and classes": (
        [["a fine film", "pos"], ["dull", "neg"], ["I laughed", "pos"]],
        "'pos' occurs again in its column",
    ),
    "UCI mushrooms": (
        [["p", "x", "s", "p"], ["e", "x", "s", "a"], ["e", "b", "s", "l"]],
        "'p' stands there twice",
    ),
    "UCI cars": (
        [["vhigh", "low", "small", "unacc"], ["vhigh", "high", "big", "acc"]],
        "'vhigh' occurs again in its column",
    ),
    "UCI votes": (
        [["republican", "n", "?"], ["democrat", "y", "n"]],
        "'?' does not look like a column name",
    ),
    "sentences in two languages": (
        [["Sit down.", "Setz dich."], ["I see it.", "Ich sehe es."]],
        "'Sit down.' does not look like a column name",
    ),
    "long sentences": (
        [["the film is not bad at all", "x"], ["what a waste of my time", "y"]],
        "'the film is not bad at all' does not look like a column name",
    ),
    "addresses": ([["a@b.org", "x"], ["c@d.org", "y"]], "'a@b.org' does not look like"),
    "paths": ([["/data/1", "cat"], ["/data/2", "dog"]], "'/data/1' does not look like"),
    "dates": ([["2024-01-01", "up"], ["2024-01-02", "down"]], "'2024-01-01' does not look"),
    "answers": ([["yes", "Anna"], ["maybe", "Bob"]], "'yes' does not look like a column name"),
    "gaps": ([["NA", "good"], ["NA", "bad"]], "'NA' does not look like a column name"),
    "nothing": ([["", ""], ["a", "b"]], "it is empty"),
}


def table(rows: Iterable[Iterable[Any]], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=delimiter).writerows(rows)
    return file.getvalue().encode()


def names(columns: DatasetColumns) -> list[str]:
    return [column["name"] for column in columns.meta["columns"]]


@pytest.mark.parametrize("shape", WITH_HEADER)
@pytest.mark.parametrize(("form", "delimiter"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
def test_names_in_the_first_row_are_a_header(
    ingesting: Ingesting, shape: str, form: str, delimiter: str
):
    header, rows = WITH_HEADER[shape]
    if delimiter == ";" and (len(header) == 1 or "," in str(rows)):
        return
    columns = ingesting(form, table([header, *rows], delimiter))
    assert names(columns) == [name or f"c{place}" for place, name in enumerate(header)]
    assert columns.meta["splits"] == {"all": len(rows)}
    (note,) = columns.meta["notes"]
    assert note["code"] == "header_guessed"
    assert header[-1] in note["detail"]
    assert note["detail"].endswith("upload the file again with header=false.")


@pytest.mark.parametrize("shape", WITHOUT)
def test_a_first_row_like_the_others_is_data(ingesting: Ingesting, shape: str):
    rows, why = WITHOUT[shape]
    columns = ingesting("csv", table(rows))
    assert names(columns) == [f"c{place}" for place in range(len(rows[0]))]
    assert columns.meta["splits"] == {"all": len(rows)}
    (note,) = columns.meta["notes"]
    assert why in note["detail"]
    assert note["detail"].endswith("upload the file again with header=true.")


def test_a_name_that_occurs_again_far_below_is_data(ingesting: Ingesting):
    rows = [["first", "last"], *([f"n{i}", f"m{i}"] for i in range(60_000)), ["x", "last"]]
    columns = ingesting("csv", table(rows))
    assert columns.meta["splits"] == {"all": 60_002}


def test_what_is_asked_for_is_done_without_a_note(ingesting: Ingesting):
    rows = [["text", "label"], ["good", "p"], ["bad", "n"]]
    for header, found in ((True, ["text", "label"]), (False, ["c0", "c1"])):
        columns = ingesting("csv", table(rows), header=header)
        assert names(columns) == found
        assert columns.meta["splits"] == {"all": 3 - header}
        assert "notes" not in columns.meta
    numbers = table([["2019", "2020"], [1, 2]])
    assert names(ingesting("csv", numbers, header=True)) == ["2019", "2020"]
    assert names(ingesting("csv", table([["a", "b"], [1, 2]]), header=False)) == ["c0", "c1"]


def test_a_table_with_numbers_settles_it_without_a_note(ingesting: Ingesting):
    for rows in ([["text", "score"], ["good", 1]], [["good", 1], ["bad", 0]]):
        assert "notes" not in ingesting("csv", table(rows)).meta


def test_header_is_for_tables(ingesting: Ingesting):
    with pytest.raises(InvalidDataset, match="header is for csv and tsv only, and the format is"):
        ingesting("jsonl", b'{"a": 1}\n', header=True)


@pytest.mark.long
def test_the_command_takes_it(ingesting: Ingesting):
    source = ingesting.file(table([["text", "label"], ["good", "p"], ["bad", "n"]]))
    for flags, rows in ((["--header"], 2), (["--no-header"], 3), ([], 2)):
        measured = ingesting.process("csv", source, *flags)
        assert measured["answer"]["meta"]["splits"] == {"all": rows}


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("x", True),
        ("_id", True),
        ("Total (USD)", True),
        ("share %", True),
        ("C#", False),  # ends as few names do
        ("a, b", False),
        ("Really?", False),
        ("3rd", False),
        ("one two three four five", False),
        ("x" * 65, False),
        ("true", False),
        ("N/A", False),
        ("it's", False),
        ("https://example.org/a?b=c", False),
    ],
)
def test_what_looks_like_a_name(text: str, is_one: bool):
    assert is_name(text) is is_one
