import csv
import io
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.storage.columns import DatasetColumns
from tests.unit.ingest.conftest import Ingesting


def dtypes(columns: DatasetColumns) -> dict[str, str]:
    return {column["name"]: column["dtype"] for column in columns.meta["columns"]}


def test_a_table_with_a_header_keeps_names_types_and_missing_values(ingesting: Ingesting):
    columns = ingesting(
        "csv", b"species,length,count,flag\nAdelie,39.1,3,true\nGentoo,,4,false\n,1e3,-5,true\n"
    )
    assert dtypes(columns) == {
        "species": "string",
        "length": "float64",
        "count": "int64",
        "flag": "string",
    }
    assert columns.meta["splits"] == {"all": 3}
    assert [column["missing"] for column in columns.meta["columns"]] == [1, 1, 0, 0]
    np.testing.assert_array_equal(columns.array("all", "length"), [39.1, math.nan, 1000.0])
    np.testing.assert_array_equal(columns.array("all", "count"), [3, 4, -5])
    assert columns.texts("all", "species") == ["Adelie", "Gentoo", ""]


@pytest.mark.parametrize(
    ("text", "names", "rows"),
    [
        (b"1,2\n3,4\n", ["c0", "c1"], 2),
        (b"a,b\n1,2\n", ["a", "b"], 1),
        (b"x,1\ny,2\n", ["c0", "c1"], 2),  # no column is otherwise numeric: no header
        (b"x,1\ny,z\n", ["c0", "c1"], 2),
        (b"NA,1\n2,3\n", ["c0", "c1"], 2),  # a gap is no name
        (b"?,x\n2,y\n", ["c0", "c1"], 2),
        (b"id,2019,2020\n1,2,3\n", ["id", "2019", "2020"], 1),
        (b",b\n0,1\n", ["c0", "b"], 1),  # a data frame's index has no name
        (b"a\n\n1\n\n2\n", ["a"], 2),  # blank lines are passed over
        (b"\xef\xbb\xbfa,b\r\n1,2\r\n", ["a", "b"], 1),
        (b"a;b\n1;2\n", ["a", "b"], 1),
        (b"a\tb\n1\t2\n", ["a", "b"], 1),
        (b'"a, b","c\nd"\n1,2\n', ["a, b", "c\nd"], None),
    ],
)
def test_the_header_is_the_first_row_that_is_not_numeric(
    ingesting: Ingesting, text: bytes, names: list[str], rows: int | None
):
    if rows is None:
        assert "cannot name a column" in ingesting.problem("csv", text)
        return
    columns = ingesting("csv", text)
    assert list(dtypes(columns)) == names
    assert columns.meta["splits"] == {"all": rows}


def test_a_header_without_rows_is_a_problem(ingesting: Ingesting):
    assert ingesting.problem("csv", b"a,b\n") == "split 'all' has no rows"


def test_tabs_separate_a_tsv_and_quoted_cells_keep_line_ends(ingesting: Ingesting):
    columns = ingesting("tsv", b'text\tn\n"one\r\ntwo ""three"""\t1\nx,y\t2\n')
    assert columns.texts("all", "text") == ['one\r\ntwo "three"', "x,y"]


@pytest.mark.parametrize(
    ("cells", "dtype"),
    [
        (["1", "-2", "+3"], "int64"),
        (["9223372036854775807"], "int64"),
        (["9223372036854775808"], "float64"),
        (["1", "2.5"], "float64"),
        (["1", " "], "float64"),
        (["nan", "-inf", "Infinity"], "float64"),
        (["1_000"], "string"),
        (["٣"], "string"),
        (["1", "NA"], "string"),
        (["0x10"], "string"),
        (["2", "true"], "string"),
    ],
)
def test_a_column_has_the_narrowest_type_that_holds_all_its_cells(
    ingesting: Ingesting, cells: list[str], dtype: str
):
    text = "k,v\n" + "".join(f"{i},{cell}\n" for i, cell in enumerate(cells))
    assert dtypes(ingesting("csv", text.encode()))["v"] == dtype


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a,b\n1,2\n3\n", "line 3 has 1 cells, the first row has 2"),
        (b'a,b\n"x\ny",2\n3,4,5\n', "line 4 has 3 cells"),
        (b"a,a\n1,2\n", "line 1 names columns 0 and 1 both 'a'"),
        (b"a,b\n1,\xff\n", "line 2, byte 3 is not UTF-8"),
        (b"a,b\n1,\0\n", "line 2 holds a NUL byte"),
        (b'a,b\n1,"2\n', "line 2: a quoted cell is never closed"),
        (b'a,b\n1,"2"3\n', "line 2: "),
        (b"a\n" + b"x" * (2 << 20), "line 2: a cell is larger than 1,048,576 bytes"),
        (b'a\n"' + b"x\n" * (2 << 20), "line 2: a cell is larger"),
        (b"a\n" + b"x" * (9 << 20), "line 2: the row is larger than"),
        (b"\xff\xfea\0", "UTF-16"),
        (b",".join([b"1"] * 10_001), "line 1 has 10,001 columns"),
        (b"a\n1e999\n", "line 2: '1e999' does not fit"),
        (b"", "the file is empty"),
        (b"\n\n", "the file holds no rows"),
    ],
)
def test_a_bad_table_is_a_problem_that_names_the_line(ingesting: Ingesting, text: bytes, says: str):
    assert says in ingesting.problem("csv", text)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("last", [True, False])
def test_any_line_end_ends_a_row_and_quoted_ones_stay(ingesting: Ingesting, end: bytes, last: bool):
    rows = [b"text,n", b'"one\rtwo\r\nthree\n",1', b"plain,2"]
    columns = ingesting("csv", end.join(rows) + (end if last else b""))
    assert columns.texts("all", "text") == ["one\rtwo\r\nthree\n", "plain"]
    assert columns.array("all", "n").tolist() == [1, 2]


def test_line_ends_may_be_mixed_and_lines_are_counted_by_all_of_them(ingesting: Ingesting):
    columns = ingesting("csv", b"a,b\r1,2\n3,4\r\n5,6\r\r\n7,8")
    assert columns.array("all", "a").tolist() == [1, 3, 5, 7]
    assert "line 4 has 1 cells" in ingesting.problem("csv", b"a,b\r1,2\r\n3,4\r5\r")


@pytest.mark.long
def test_lone_carriage_returns_are_read_in_pieces(ingesting: Ingesting):
    """More than one read of the file; a pair of ends may be cut by the end of a read."""
    for extra in range(3):
        rows = [b"a" * extra + b"k,v", *(b"%0120d,%d" % (n, n) for n in range(70_000))]
        content = b"\r".join(rows[:-1]) + b"\r\n" + rows[-1]
        assert len(content) > 8 << 20
        columns = ingesting("csv", content)
        assert columns.meta["splits"] == {"all": 70_000}
        assert columns.array("all", "v")[[0, -1]].tolist() == [0, 69_999]


def test_a_column_with_one_text_says_where_it_is(ingesting: Ingesting):
    rows = "".join(f"{i},{i}\n" for i in range(40_000))  # more than one chunk
    columns = ingesting("csv", f'id,age\n{rows}7,"n\na"\n8,old\n'.encode())
    age = columns.meta["columns"][1]
    assert age["dtype"] == "string"
    assert age["no_number"] == {"line": 40_002, "value": "n\na"}
    assert "no_number" not in columns.meta["columns"][0]
    without = ingesting("csv", b"1,x\n2,3\n4,y\n").meta["columns"][1]
    assert without["no_number"] == {"line": 1, "value": "x"}
    number_first = ingesting("csv", b"1,3\n2,x\n4,y\n").meta["columns"][1]
    assert number_first["no_number"] == {"line": 2, "value": "x"}


def test_types_are_found_over_the_whole_file(ingesting: Ingesting):
    rows = 60_000  # more than one chunk
    text = "a,b\n" + "".join(f"{i},{i}\n" for i in range(rows)) + "0.5,x\n"
    columns = ingesting("csv", text.encode())
    assert dtypes(columns) == {"a": "float64", "b": "string"}
    np.testing.assert_array_equal(columns.array("all", "a"), [*range(rows), 0.5])
    assert columns.texts("all", "b", rows - 1) == [str(rows - 1), "x"]


def test_a_wide_table_needs_no_more_descriptors_than_a_narrow_one(ingesting: Ingesting):
    names = ",".join(f"n{i}" for i in range(1500))
    columns = ingesting("csv", f"{names}\n{','.join(map(str, range(1500)))}\n".encode())
    assert columns.array("all", "n1499").tolist() == [1499]


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
FLOATS = st.floats(width=64)
INTEGERS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def tables(draw: st.DrawFn):
    kinds = draw(st.lists(st.sampled_from([WORDS, FLOATS, INTEGERS]), min_size=1, max_size=4))
    rows = draw(st.lists(st.tuples(*kinds), min_size=1, max_size=8))
    return [kind is WORDS for kind in kinds], rows


@settings(max_examples=60, deadline=None)
@given(tables())
def test_what_is_written_as_csv_is_read_back(table: tuple[list[bool], list[Any]]):
    texts, rows = table
    header = [f"n{i}" for i in range(len(texts))] + ["always_numeric"]
    file = io.StringIO(newline="")
    writer = csv.writer(file, quoting=csv.QUOTE_MINIMAL)
    writer.writerow(header)
    # Text columns begin with a word, so that their type is known here.
    first = ["word" if text else row for text, row in zip(texts, rows[0], strict=True)]
    for row in [first, *rows]:
        writer.writerow([repr(x) if isinstance(x, float) else x for x in row] + [0])
    with tempfile.TemporaryDirectory() as folder:
        columns = Ingesting(Path(folder))("csv", file.getvalue().encode())
        for index, is_text in enumerate(texts):
            expected = [row[index] for row in [first, *rows]]
            if is_text:
                assert columns.texts("all", f"n{index}") == expected
            else:
                np.testing.assert_array_equal(columns.array("all", f"n{index}"), expected)
