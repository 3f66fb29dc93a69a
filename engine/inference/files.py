"""Result files of an inference: all blocks joined, in one of several formats.

safetensors and npz have a tensor for each layer and field. Their rows are read from the parts a
block at a time, for one tensor after another, so that memory stays the same for any number of
rows. The others have a line or a row for each row of the data.

Shape suffixes: N = rows, S = the steps of all rows together.
"""

import csv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from engine.core.precision import dtype_name
from engine.core.safetensors_writer import layout_of, memory_of
from engine.inference.blocks import Block, Blocks, ColumnShape, Shapes
from engine.inference.classes import Classes, class_columns, names_in
from glasshouse import jsonio
from glasshouse.errors import DataFailed
from glasshouse.spec import InferJob

MEDIA_TYPES = {
    "safetensors": "application/vnd.safetensors",
    "npz": "application/zip",
    "jsonl": "application/jsonl",
    "csv": "text/csv",
    "parquet": "application/vnd.apache.parquet",
}


@dataclass(frozen=True)
class Whole:
    """A tensor of the result that is read a block at a time."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: "partial[Iterator[Tensor]]"
    """Yields it in pieces along axis 0."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return it as a whole."""
        return torch.cat([*self.chunks()]).reshape(self.shape)

    def write(self, file: IO[bytes]) -> None:
        """Write its bytes.

        Raises:
            RuntimeError: the blocks do not make up its shape, so the file would be damaged.
        """
        num_bytes = 0
        for chunk in self.chunks():
            num_bytes += file.write(memory_of(chunk.contiguous()))
        if num_bytes != self.num_bytes:
            detail = f"blocks of {num_bytes} bytes for a tensor of shape {[*self.shape]}"
            raise RuntimeError(f"{detail}, which has {self.num_bytes}")


# --- tensors ---------------------------------------------------------------------------------


def tensors_of(
    job: InferJob, wanted: Sequence[str], blocks: Blocks, shapes: Shapes, *, has_gaps: bool
) -> dict[str, Whole]:
    """Return the tensors of a result by name, in the layout that the job asks for.

    If rows were dropped (``has_gaps``), ``row`` has the numbers of the others.
    """
    found = _joined(job, wanted, blocks, shapes) if job.flatten is not False else {}
    if not found:
        packed = job.sequence_layout == "packed"
        for name, column in shapes.columns.items():
            chunks = partial(_chunks, blocks, name, None if packed else column.longest)
            found[name] = Whole(column.dtype, _shape(column, shapes.num_rows, packed), chunks)
    ragged = [name for name, column in shapes.columns.items() if column.longest is not None]
    for name in {name.rpartition("/")[0]: name for name in ragged}.values():
        lengths = Whole(torch.int64, (shapes.num_rows,), partial(_lengths, blocks, name))
        found[f"{name.rpartition('/')[0]}/lengths"] = lengths
    if has_gaps:
        found["row"] = Whole(torch.int64, (shapes.num_rows,), partial(_rows, blocks))
    return found


def _shape(column: ColumnShape, num_rows: int, packed: bool) -> tuple[int, ...]:
    if column.longest is None or packed:
        return (column.num_values, *column.item)
    return (num_rows, column.longest, *column.item)


def _chunks(blocks: Blocks, name: str, longest: int | None) -> Iterator[Tensor]:
    """Yield a column; padded to ``longest`` steps unless that is None."""
    for block in blocks():
        column = block.columns[name]
        yield column.values if longest is None else column.padded(longest)


def _lengths(blocks: Blocks, name: str) -> Iterator[Tensor]:
    for block in blocks():
        lengths = block.columns[name].lengths
        assert lengths is not None  # noqa: S101 (the caller looked)
        yield lengths


def _rows(blocks: Blocks) -> Iterator[Tensor]:
    for block in blocks():
        yield block.rows


def _joined(
    job: InferJob, wanted: Sequence[str], blocks: Blocks, shapes: Shapes
) -> dict[str, Whole]:
    """Return for each field the tensors of all layers, joined along rows (0) or columns (1).

    Raises:
        DataFailed: to join rows, the layers differ in their number of columns.
    """
    assert job.flatten is not False  # noqa: S101 (the caller looked)
    packed, axis = job.sequence_layout == "packed", job.flatten.axis
    titles = dict.fromkeys(name.rpartition("/")[2] for name in shapes.columns)
    found: dict[str, Whole] = {}
    for title in titles:
        names = [f"{name}/{title}" for name in wanted]
        columns = [shapes.columns[name] for name in names]
        whole = [_shape(column, shapes.num_rows, packed) for column in columns]
        widths = [torch.Size(shape[1:]).numel() for shape in whole]
        longest = [None if packed else column.longest for column in columns]
        pairs = [*zip(names, longest, strict=True)]
        dtype = reduce(torch.promote_types, [column.dtype for column in columns])
        shape = (sum(part[0] for part in whole), widths[0])
        if axis == 1:
            shape = (whole[0][0], sum(widths))
        elif len(set(widths)) > 1:  # with padding, the plan may not know
            listed = ", ".join(f"{name!r} has {n}" for name, n in zip(names, widths, strict=True))
            detail = f"To join {title} below each other, all layers need as many values per row:"
            raise DataFailed(f"{detail} {listed}.", hint="Set flatten to false.")
        joining = _beside if axis == 1 else _below
        found[title] = Whole(dtype, shape, partial(joining, blocks, pairs, dtype))
    return found


def _beside(
    blocks: Blocks, columns: Sequence[tuple[str, int | None]], dtype: torch.dtype
) -> Iterator[Tensor]:
    for block in blocks():
        parts = [
            item.values if longest is None else item.padded(longest)
            for name, longest in columns
            for item in (block.columns[name],)
        ]
        yield torch.cat([part.reshape(len(part), -1) for part in parts], dim=1).to(dtype)


def _below(
    blocks: Blocks, columns: Sequence[tuple[str, int | None]], dtype: torch.dtype
) -> Iterator[Tensor]:
    for name, longest in columns:
        for part in _chunks(blocks, name, longest):
            yield part.reshape(len(part), -1).to(dtype)


def write_safetensors(path: Path, tensors: Mapping[str, Whole], about: Mapping[str, str]) -> None:
    """Write tensors, and texts by name.

    Raises:
        OSError: the file cannot be written.
    """
    layout = layout_of({n: (dtype_name(x.dtype), x.shape) for n, x in tensors.items()}, about)
    with path.open("wb") as file:
        file.write(layout.header)
        for name in layout.offsets:
            tensors[name].write(file)


def write_npz(path: Path, tensors: Mapping[str, Whole], about: Mapping[str, str]) -> None:
    """Write tensors, and the names of classes as arrays of text.

    Raises:
        OSError: the file cannot be written.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, whole in tensors.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                dtype = torch.empty(0, dtype=whole.dtype).numpy().dtype
                described = {"descr": dtype.str, "fortran_order": False, "shape": whole.shape}
                np.lib.format.write_array_header_2_0(file, described)
                whole.write(file)
        for name, text in about.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, np.array(jsonio.loads(text)), allow_pickle=False)


# --- rows ------------------------------------------------------------------------------------


def cells_of(block: Block, known: Mapping[str, Classes]) -> dict[str, Any]:
    """Return the columns of a block as nested lists, one item for each row, with class names."""
    found: dict[str, Any] = {}
    for name, column in block.columns.items():
        found[name] = [row.tolist() for row in column.by_row()]
        for title, classes in class_columns(name, known).items():
            found[title] = classes.names(found[name])
    return found


def write_jsonl(path: Path, blocks: Blocks, known: Mapping[str, Classes]) -> None:
    """Write an object for each row: ``{"row": 0, "<layer>/<field>": …}``.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        for block in blocks():
            cells = {"row": block.rows.tolist(), **cells_of(block, known)}
            for row in zip(*cells.values(), strict=True):
                file.write(jsonio.dumps(dict(zip(cells, row, strict=True))) + "\n")


def write_csv(path: Path, blocks: Blocks, known: Mapping[str, Classes]) -> None:
    """Write a line for each row. A value of several numbers has a column for each.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        is_first = True
        for block in blocks():
            cells = {"row": block.rows.tolist(), **_flat(block, known)}
            if is_first:
                writer.writerow(cells)
                is_first = False
            writer.writerows(zip(*cells.values(), strict=True))


def _flat(block: Block, known: Mapping[str, Classes]) -> dict[str, Any]:
    """Return the columns of a block with a cell for each number."""
    found: dict[str, Any] = {}
    for name, column in block.columns.items():
        flat = column.values.reshape(len(column.values), -1)
        named = class_columns(name, known)
        for place in range(flat.shape[1]):
            end = "" if column.values.dim() == 1 else f"/{place}"
            found[f"{name}{end}"] = flat[:, place].tolist()
            for title, classes in named.items():
                found[f"{title}{end}"] = classes.names(found[f"{name}{end}"])
    return found


def write(
    path: Path,
    job: InferJob,
    tensors: Mapping[str, Whole],
    blocks: Blocks,
    known: Mapping[str, Classes],
) -> None:
    """Write a result in the format of the job.

    Raises:
        OSError: the file cannot be written.
    """
    if job.format in ("safetensors", "npz"):
        about = names_in(known, tensors)
        writing = write_safetensors if job.format == "safetensors" else write_npz
        writing(path, tensors, about)
        return
    if job.format == "parquet":
        from engine.inference.arrow import write_parquet  # noqa: PLC0415 (takes 0.2 s)

        write_parquet(path, blocks, known)
        return
    writing = write_jsonl if job.format == "jsonl" else write_csv
    writing(path, blocks, known)
