"""Blocks as Arrow record batches: nested lists of fixed size, and a list for the steps of a row.

Arrays are made of buffers: ``pyarrow.array`` and ``pyarrow.record_batch`` import pandas if it is
installed, which takes a second, and fails where pickle is sealed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch import Tensor

from engine.inference.blocks import Block, Blocks, Column
from engine.inference.classes import Classes, class_columns

ArrowException = pa.ArrowException
_ROW = "row"
_MARK = b"part"
_GROUP_BYTES = 32 * 2**20
"""The size of Parquet's row groups."""
_GROUP_ROWS = 1 << 16


def new_file(path: Path, like: Block, mark: bytes) -> Any:
    """Return the writer of a new file of blocks like one; ``mark``: see `mark_of`.

    Raises:
        OSError: the file cannot be written.
    """
    schema = batch_of(like).schema.with_metadata({_MARK: mark})
    return pa.ipc.new_file(str(path), schema)


def mark_of(path: Path) -> bytes | None:
    """Return what a file says of itself.

    Raises:
        OSError, ArrowException: the file cannot be read.
    """
    with pa.ipc.open_file(pa.OSFile(str(path), "rb")) as file:
        return (file.schema.metadata or {}).get(_MARK)


def blocks_in(path: Path) -> Iterator[Block]:
    """Yield the blocks of a file, one in memory at a time.

    Raises:
        OSError, ArrowException: the file cannot be read.
    """
    with pa.ipc.open_file(pa.OSFile(str(path), "rb")) as file:
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            names = [name for name in batch.schema.names if name != _ROW]
            columns = {name: _column(batch.column(name)) for name in names}
            yield Block(_tensor(batch.column(_ROW)), columns)


def batch_of(block: Block, known: Mapping[str, Classes] | None = None) -> Any:
    """Return a block as a record batch; ``known``: the classes to add the names of."""
    arrays = {_ROW: _primitive(block.rows)}
    for name, column in block.columns.items():
        arrays[name] = _array(column)
        for title, classes in class_columns(name, known or {}).items():
            arrays[title] = pa.array([classes.names(row.tolist()) for row in column.by_row()])
    return pa.RecordBatch.from_arrays([*arrays.values()], names=[*arrays])


def write_parquet(path: Path, blocks: Blocks, known: Mapping[str, Classes]) -> None:
    """Write a row for each row, in groups of about 32 MiB; values are nested lists.

    Raises:
        OSError: the file cannot be written.
    """
    writer: Any = None
    waiting: list[Any] = []

    def write() -> None:
        table = pa.Table.from_batches(waiting)
        writer.write_table(table, row_group_size=table.num_rows)
        waiting.clear()

    for block in blocks():
        waiting.append(batch_of(block, known))
        writer = writer or pq.ParquetWriter(path, waiting[0].schema)
        num_bytes = sum(batch.nbytes for batch in waiting)
        if num_bytes >= _GROUP_BYTES or sum(batch.num_rows for batch in waiting) >= _GROUP_ROWS:
            write()
    if waiting:
        write()
    writer.close()


def _array(column: Column) -> Any:
    """Return a column with an item for each row."""
    values = _primitive(column.values.reshape(-1))
    for size in reversed(column.values.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    if column.lengths is None:
        return values
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), column.lengths.cumsum(0).int()])
    return pa.ListArray.from_arrays(_primitive(ends), values)


def _primitive(x: Tensor) -> Any:
    if x.dtype == torch.bool:
        return pa.array(x.tolist(), pa.bool_())
    numbers = x.numpy()
    buffer = pa.py_buffer(numbers)
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, buffer])


def _column(array: Any) -> Column:
    if not pa.types.is_list(array.type):
        return Column(_tensor(array))
    lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
    return Column(_tensor(array.flatten()), torch.from_numpy(lengths))


def _tensor(array: Any) -> Tensor:
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=False)
    return torch.from_numpy(np.array(values)).reshape(shape)  # copied: Arrow's memory is read-only
