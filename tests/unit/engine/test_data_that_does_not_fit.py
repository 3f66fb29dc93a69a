"""Data that does not fit its fields: named by row, column and field, in memory and from files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.data.columns.prepared import Prepared, Preparing
from engine.data.columns.table import StoredTable, Table
from engine.data.columns.vocabulary import Tokens
from engine.data.sources.loading import load
from engine.data.sources.reading import SourceReader
from engine.data.sources.streamed import StreamedRows
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseField,
    Field,
    IntegerField,
    IntegerSequenceField,
    Sequences,
    Shuffle,
    Source,
)
from tests.unit.engine.ragged import write_ragged
from tests.unit.engine.runs import errors, spec

ROWS = [{"x": [0.5] * (2 + (n == 7)), "text": "a b c", "label": n % 3} for n in range(12)]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ragged(tmp_path_factory.mktemp("unfit"), ROWS)


def read(table: Path, fields: dict[str, Field], how: str, **more: Any) -> None:
    """Read all rows."""
    source, cpu = Source(dataset="d"), torch.device("cpu")
    if how == "memory":
        load(source, fields, Table(table), seed=0, device=cpu, **more)
        return
    given = {"limit": Sequences(), **more}
    reader = SourceReader(source, fields, StoredTable(table), seed=0, **given)
    for _ in StreamedRows(reader, cpu, shuffle=Shuffle(buffer_size=4)).in_order(4):
        pass


TEXT = IntegerSequenceField(type="integer_sequence", tokens="words", dim=4)
UNFIT: dict[str, tuple[dict[str, Field], dict[str, Any], str]] = {
    "ragged rows in a dense column": (
        {"x": DenseField(type="dense", shape=(2,))},
        {},
        "row 7 of split 'all' has 3 values in column 'x'; field 'x' takes 2",
    ),
    "a label out of range": (
        {"label": IntegerField(type="integer", dim=2)},
        {},
        "row 2 of split 'all' has 2 in column 'label'; field 'label' takes integers in [0, 2)",
    ),
    "a sequence that is too long": (
        {"text": TEXT},
        {"limit": Sequences(max_length=2, overflow="error")},
        "row 0 of split 'all' has 3 steps in column 'text'; data.sequence.max_length is 2",
    ),
    "a vocabulary that does not match": (
        {"text": TEXT},
        {"preparing": Preparing(known=Prepared(tokens={"text": Tokens("abcde")}))},
        "the vocabulary of 'text' has 7 ids, and its dim is 4",
    ),
    "a column that is not there": (
        {"y": DenseField(type="dense")},
        {},
        "the dataset has no column 'y'; it has: x, text, label",
    ),
}


@pytest.mark.parametrize("how", ["memory", "files"])
@pytest.mark.parametrize("kind", UNFIT)
def test_what_does_not_fit_is_named(table, kind, how):
    fields, more, says = UNFIT[kind]
    with pytest.raises(DataFailed) as caught:
        read(table, fields, how, **more)
    assert caught.value.detail == says


def test_the_plan_names_a_column_that_is_not_there():
    fields = {"image": {"type": "dense", "column": "picture"}, "label": {"type": "integer"}}
    found = errors(spec(data={"fields": fields}))
    says = "the dataset has no column 'picture'; it has: image, label"
    assert found["/data/fields/image/column"] == says
