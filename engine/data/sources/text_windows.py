"""Windows over a running text as rows: blocks for language models, contexts for word vectors.

The running text is all rows of its column, each followed by a line-end token. The tokens are in
memory once; a window is stored as its start.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.batches.rows import Loaded, MemoryRows, place
from engine.data.columns.fields import (
    BadField,
    checked_shape,
    field_columns,
    num_tokens,
    token_bound,
)
from engine.data.columns.loaded import LoadedField, LoadedSequence
from engine.data.columns.prepared import WINDOWS, Prepared
from engine.data.columns.sequences import check_tokens
from engine.data.columns.table import Table
from engine.data.columns.vocabulary import Tokenized, Tokens
from glasshouse.errors import DataFailed
from glasshouse.spec import DenseField, Field, IntegerField, LanguageModelWindows, Source, Windows


def num_windows(windows: Windows, num_tokens: int) -> int:
    """Return how many windows a text of ``num_tokens`` tokens has."""
    is_block = isinstance(windows, LanguageModelWindows)
    room = num_tokens - 1 - (windows.length if is_block else 2 * windows.window)
    return room // stride_of(windows) + 1 if room >= 0 else 0


def stride_of(windows: Windows) -> int:
    """Return the number of tokens from the start of a window to the start of the next."""
    if isinstance(windows, LanguageModelWindows):
        return windows.stride or windows.length
    return windows.stride


def offsets_of(windows: Windows, column: str) -> NDArray[np.int64]:
    """Return the offsets of the tokens in a window that belong to a column."""
    if isinstance(windows, LanguageModelWindows):
        return np.arange(windows.length) + int(column == "target")
    if column == "centre":
        return np.array([windows.window])
    return np.delete(np.arange(2 * windows.window + 1), windows.window)


def part_of(num_tokens: int, fraction: tuple[float, float] | None) -> tuple[int, int]:
    """Return the first token of a part of a running text, and the one after its last."""
    first, last = fraction or (0.0, 1.0)
    return math.floor(first * num_tokens), math.floor(last * num_tokens)


def windowed(
    meta: Mapping[str, Any], windows: Windows, split: str | None = None, dim: int | None = None
) -> dict[str, Any]:
    """Return the metadata of a dataset as windows over one of its columns.

    ``tokens`` is the length of the running text of each split. The vocabulary is that of ``split``,
    or of all splits if none is named. ``dim``: its size, if already known.

    Raises:
        BadField: the dataset has no such text column.
    """
    column = next((item for item in meta["columns"] if item["name"] == windows.column), None)
    if column is None or column["dtype"] != "string":
        what = "no column" if column is None else "no texts in its column"
        raise BadField(f"the dataset has {what} {windows.column!r}", "column")
    found = num_tokens(column, windows.tokens)
    tokens = {split: found[split] + int(rows) for split, rows in meta["splits"].items()}
    dim = dim or token_bound(column, windows.tokens, windows.vocabulary, split, line_ends=True)
    shapes: dict[str, list[int]] = {"context": [0], "centre": []}
    if isinstance(windows, LanguageModelWindows):
        shapes = {"input": [windows.length], "target": [windows.length]}
    else:
        shapes["context"] = [2 * windows.window]
    columns = [
        {"name": name, "dtype": "int32", "shape": shape, "dim": dim}
        for name, shape in shapes.items()
    ]
    splits = {split: num_windows(windows, count) for split, count in tokens.items()}
    lines = {split: int(rows) for split, rows in meta["splits"].items()}
    counts = {split: item["at_least"] for split, item in column["tokens"][windows.tokens].items()}
    distinct = {split: None if n is None else (n[0] if n else 0) for split, n in counts.items()}
    return {
        "columns": columns,
        "splits": splits,
        "tokens": tokens,
        "lines": lines,
        "distinct": distinct,
    }


class RunningText:
    """The part of a running text that a source uses, and the windows over it."""

    def __init__(self, windows: Windows, table: Table, source: Source) -> None:
        """Find the part.

        Raises:
            DataFailed: there is no such text, or it is shorter than a window.
        """
        table.num_rows(source.split)
        try:
            self._meta = windowed(table.meta, windows)
        except BadField as cause:
            raise DataFailed(str(cause)) from cause
        self.first, self.last = part_of(self._meta["tokens"][source.split], source.fraction)
        num_tokens = self.last - self.first
        self.num_rows = num_windows(windows, num_tokens)
        if not self.num_rows:
            detail = f"the text of split {source.split!r} has {num_tokens} tokens here, and"
            raise DataFailed(f"{detail} a window takes more", hint="Make data.windows smaller.")

    def check(self, fields: Mapping[str, Field], tokens: Tokens) -> None:
        """Refuse fields that read something else.

        Raises:
            DataFailed: a field reads something else, or its ``dim`` is too small.
        """
        for name, field in fields.items():
            check_tokens(name, tokens, int(checked_shape(name, field, self._meta).dim or 0))


def ids_allowed(fields: Mapping[str, Field]) -> int | None:
    """Return the maximum number of ids in the vocabulary that the fields allow; None: any."""
    known = [field.dim for field in fields.values() if not isinstance(field, DenseField)]
    return min((dim for dim in known if dim is not None), default=None)


def load_windows(
    windows: Windows,
    source: Source,
    fields: Mapping[str, Field],
    table: Table,
    device: torch.device,
    known: Prepared | None,
) -> MemoryRows:
    """Read the windows over the running text of a source, all over one text in memory.

    Raises:
        DataFailed: there is no such text, it is shorter than a window, or a field reads something
            else.
    """
    text = RunningText(windows, table, source)
    texts = table.texts(source.split, windows.column)
    tokenized = Tokenized(texts, windows.tokens, line_ends=True)
    passing = tokenized.passing[text.first : text.last]
    if known is None or WINDOWS not in known.tokens:
        tokens = tokenized.build(windows.vocabulary, ids_allowed(fields), passing)
        known = Prepared(tokens={WINDOWS: tokens})
    tokens = known.tokens[WINDOWS]
    text.check(fields, tokens)
    ids = torch.from_numpy(tokenized.ids(tokens, passing))
    starts_N = torch.arange(text.num_rows) * stride_of(windows)
    loaded: dict[str, Loaded] = {}
    for name, field in fields.items():
        offsets = torch.from_numpy(offsets_of(windows, *field_columns(name, field)))
        if isinstance(field, IntegerField):
            loaded[name] = LoadedField(ids[starts_N + offsets].to(torch.int64), is_integer=True)
            continue
        lengths_N = torch.full((text.num_rows,), len(offsets))
        loaded[name] = LoadedSequence(ids, starts_N, lengths_N, is_integer=True, around=offsets)
    made = place(loaded, text.num_rows, device)
    made.prepared = known
    return made
